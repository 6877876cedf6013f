"""A model of gated delta nets beside a dense one of as many weights: decoding, and the second turn of a chat.

    python bench/delta_nets.py [--tokens 48] [--history 2000] [--rounds 5] [--dtype bfloat16] [--quantization int8]

Qwen3.5-0.8B's sizes with random weights, and a Qwen3 of as many parameters. Engines take turns; a line has the median
of the rounds, the least and the most. A second turn adds 30 tokens to a prompt of so many and its answer; a cold prompt
is of that length, and no turn was before it.
"""

import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from quire import LLM, SamplingParams
from quire.model.config import num_parameters, spec_from_config

SIZES: dict[str, object] = {
    "vocab_size": 248_320, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
HYBRID = SIZES | {
    "architectures": ["Qwen3_5ForCausalLM"], "intermediate_size": 3584, "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
}  # fmt: skip
TURN = 30  # tokens that a second turn adds


def dense() -> dict[str, object]:
    """Return a Qwen3 with the parameters of the hybrid, by the width of its feed-forwards."""
    config, goal = SIZES | {"architectures": ["Qwen3ForCausalLM"]}, num_parameters(spec_from_config(HYBRID))
    smaller, larger = (num_parameters(spec_from_config(config | {"intermediate_size": size})) for size in (32, 64))
    return config | {"intermediate_size": 32 + round((goal - smaller) / (larger - smaller)) * 32}


class Engine:
    """A model with random weights."""

    def __init__(self, config: dict[str, object], folder: Path, **options: object) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        self._llm = LLM(folder, load_format="dummy", max_model_len=4096, max_num_seqs=4, **options)

    def seconds(self, prompt: list[int], num_tokens: int) -> float:
        """Return the time of an answer."""
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        begun = time.perf_counter()
        self.answer = self._llm.generate([prompt], params, use_tqdm=False)[0]
        return time.perf_counter() - begun

    def step_ms(self, prompt: list[int], num_tokens: int) -> float:
        """Return the time of a step of decoding."""
        first = self.seconds(prompt, 1)
        return 1e3 * (self.seconds(prompt, num_tokens + 1) - first) / num_tokens


def main(
    tokens: Annotated[int, typer.Option()] = 48,
    history: Annotated[int, typer.Option()] = 2000,
    rounds: Annotated[int, typer.Option()] = 5,
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    quantization: Annotated[str, typer.Option()] = "",
) -> None:
    """Measure and print."""
    options = {"dtype": dtype} | ({"quantization": quantization} if quantization else {})
    rng, found = random.Random(0), dict[str, list[float]]()

    def prompt(length: int) -> list[int]:
        return [rng.randrange(1000) for _ in range(length)]

    with tempfile.TemporaryDirectory() as folder:
        engines = {
            name: Engine(config, Path(folder) / name, **options)
            for name, config in (("hybrid", HYBRID), ("dense", dense()))
        }
        for number in range(rounds + 1):  # the first one warms up
            for name, engine in engines.items():
                first = prompt(history)
                cold = engine.seconds(first, 1)
                engine.seconds(first, 8)
                again = [*first, *engine.answer.outputs[0].token_ids, *prompt(TURN)]
                second, cached = engine.seconds(again, 1), engine.answer.num_cached_tokens
                step = engine.step_ms(prompt(16), tokens)
                if number:
                    kinds = "decode ms", "cold TTFT s", "second turn s", "cached tokens"
                    for kind, value in zip(kinds, (step, cold, second, cached), strict=True):
                        found.setdefault(f"{name}: {kind}", []).append(value)
    for what, values in found.items():
        print(f"{what}: {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    typer.run(main)
