"""Images: seconds of an encoder beside transformers, and the first token of a second question about one image.

    python bench/images.py            # CLIP-L of 336 pixels, random weights, and a small Llama behind it

A and B alternate, and medians and ranges of all rounds are printed. transformers runs with as many threads as Quire.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from quire import LLM, SamplingParams
from quire.core.images import PromptImage
from quire.core.token_ids import pack_tokens
from quire.engine.requests.input_processor import TokenizedPrompt

CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 336, "patch_size": 14, "projection_dim": 768, "hidden_act": "quick_gelu",
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 32_064, "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 4096,
}  # fmt: skip
CONFIG = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": CLIP,
    "text_config": LLAMA, "image_token_index": 32_000,
}  # fmt: skip
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def timed(run: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


def shown(name: str, seconds: list[float]) -> None:
    """Print the median and the range of some times."""
    print(f"{name}: {statistics.median(seconds) * 1e3:.1f} ms ({min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f})")


def reference(dtype: str) -> Callable[[np.ndarray], object]:
    """Return transformers' encoder of the same sizes."""
    import torch  # noqa: PLC0415 (for this comparison alone)
    import transformers  # noqa: PLC0415

    model = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**CLIP)).eval().to(getattr(torch, dtype))

    def encode(pixels: np.ndarray) -> object:
        with torch.inference_mode():
            given = torch.from_numpy(pixels)[None].to(model.dtype)
            return model(given, output_hidden_states=True).hidden_states[-2]

    return encode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--alone", action="store_true", help="without transformers")
    args = parser.parse_args()
    pixels = np.random.default_rng(0).standard_normal((3, 336, 336), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, dtype=args.dtype, num_kv_blocks=256)
    with llm:
        tower = llm._engine.model.vision  # type: ignore[attr-defined]
        theirs = None if args.alone else reference(args.dtype)
        ours_s, theirs_s = list[float](), list[float]()
        for _ in range(args.rounds + 1):
            ours_s.append(timed(lambda: tower.encode(pixels)))
            if theirs is not None:
                theirs_s.append(timed(lambda: theirs(pixels)))
        shown("encoder and projector", ours_s[1:])
        if theirs is not None:
            shown("transformers' encoder", theirs_s[1:])

        def first_token(parts: list[int], image: bool, question: int) -> float:
            ids = [*parts, *range(question, question + 16)]
            found = PromptImage(8, 576, 1, (24, 24), (3, 336, 336), pixels.tobytes())
            prompt = TokenizedPrompt(None, pack_tokens(ids), images=(found,) if image else ())
            return timed(lambda: llm._finish_all(llm._prepare([prompt], ONE_TOKEN), use_tqdm=False))

        behind_image = [*range(100, 108), *[32_000] * 576]
        behind_text = [*range(200, 208), *range(1000, 1576)]
        shown("first question about an image", [first_token(behind_image, True, 5000)])
        first_token(behind_text, False, 5000)
        again, text = list[float](), list[float]()
        for number in range(1, 4 * args.rounds + 1):
            again.append(first_token(behind_image, True, 5000 + 32 * number))
            text.append(first_token(behind_text, False, 5000 + 32 * number))
        shown("second question about it", again)
        shown("text behind a cached prefix", text)


if __name__ == "__main__":
    main()
