"""Cost of grammars: added time per token and sequence, time to first token with a new schema, tokens per step.

    python bench/grammar.py [MODEL]                       # the demo model, vocabulary of 4,096
    python bench/grammar.py --tokenizer FOLDER            # a random model of two layers with that vocabulary
    python bench/grammar.py /path/to/Qwen2.5-0.5B         # a forward pass that hides the masks

Runs with and without a grammar take turns; medians over turns, with the least and the most. Times are of this process's
wall clock, so run it on a quiet machine; `cpu` is CPU time of all threads. All three parts use the schema of 100
properties that the second one times, with another name in each run, so that none is in the cache.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from safetensors.torch import save_file

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.text.tokenizer import Tokenizer

PROMPT = [5, 6, 7, 8] * 8
NUM_PROPERTIES = 100
_names = count()


class Timing(NamedTuple):
    """Seconds of one run, its tokens and its steps."""

    wall_s: float
    cpu_s: float
    num_tokens: int
    num_steps: int


def random_model(folder: Path, tokenizer: Path) -> Path:
    """Write a random Llama of two narrow layers with the vocabulary of a tokenizer, padded to a multiple of 256."""
    vocab_size = -(-Tokenizer.from_folder(tokenizer).vocab_size // 256) * 256
    width, inner, generator = 64, 128, torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    tensors = {"model.embed_tokens.weight": weight(vocab_size, width), "model.norm.weight": torch.ones(width)}
    for layer in range(2):
        place = f"model.layers.{layer}"
        tensors |= {f"{place}.self_attn.{name}_proj.weight": weight(width, width) for name in "qkvo"}
        tensors |= {f"{place}.mlp.{name}_proj.weight": weight(inner, width) for name in ("gate", "up")}
        tensors |= {f"{place}.mlp.down_proj.weight": weight(width, inner)}
        tensors |= {f"{place}.{name}_layernorm.weight": torch.ones(width) for name in ("input", "post_attention")}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size, "hidden_size": width,
        "intermediate_size": inner, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def new_schema() -> StructuredOutputsParams:
    """Return a schema that no run has had: 100 required properties of four kinds."""
    tag = next(_names)
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 20}, {"type": "integer", "minimum": 0, "maximum": 99999}, {"type": "boolean"},
        {"type": "array", "items": {"enum": ["first", "second", "third"]}, "minItems": 1, "maxItems": 3},
    ]  # fmt: skip
    properties = {f"property_{tag}_{index}": kinds[index % 4] for index in range(NUM_PROPERTIES)}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return StructuredOutputsParams(json=schema)


def run(llm: LLM, num_seqs: int, num_tokens: int, constraint: StructuredOutputsParams | None) -> Timing:
    """Decode some sequences at once."""
    plans = list[object]()
    llm._engine.engine.on_submit = plans.append
    params = [
        SamplingParams(max_tokens=num_tokens, seed=seed, ignore_eos=True, structured_outputs=constraint)
        for seed in range(num_seqs)
    ]
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    outputs = llm.generate([PROMPT] * num_seqs, params, use_tqdm=False)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    return Timing(wall_s, cpu_s, sum(len(output.outputs[0].token_ids) for output in outputs), len(plans))


def first_token_s(llm: LLM, constraint: StructuredOutputsParams | None) -> float:
    """Return the seconds to the first token of one request."""
    params = SamplingParams(max_tokens=2, seed=0, ignore_eos=True, structured_outputs=constraint)
    started_s = time.perf_counter()
    stream = llm.stream([PROMPT], params)
    next(stream)
    elapsed_s = time.perf_counter() - started_s
    list(stream)
    return elapsed_s


def spread(values: list[float], scale: float) -> str:
    low, middle, high = (each * scale for each in (min(values), statistics.median(values), max(values)))
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def turns(num: int, *runs: Callable[[], Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the results of all runs of a turn, after one turn to warm up."""
    for turn in range(num + 1):
        results = tuple(each() for each in runs)
        if turn:
            yield results


def main(
    model: Annotated[str | None, typer.Argument()] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="folder with the vocabulary of a random model")] = None,
    num_seqs: int = 32,
    num_tokens: int = 128,
    num_turns: int = 5,
) -> None:
    """Print the three tables."""
    with tempfile.TemporaryDirectory() as folder:
        where = model if tokenizer is None else str(random_model(Path(folder), tokenizer))
        options = {"max_model_len": 1024, "num_kv_blocks": 4096, "enable_prefix_caching": False}
        for jumps_forward in (False, True):
            with LLM(where, tokenizer=tokenizer, enable_jump_forward=jumps_forward, **options) as llm:
                measure(llm, num_seqs, num_tokens, num_turns, jumps_forward=jumps_forward)


def measure(llm: LLM, num_seqs: int, num_tokens: int, num_turns: int, *, jumps_forward: bool) -> None:
    if not jumps_forward:
        print(f"vocabulary {llm.vocab_size:,}; first grammar of all: {first_token_s(llm, new_schema()) * 1e3:.0f} ms")
        firsts = list(turns(4 * num_turns, lambda: first_token_s(llm, None), lambda: first_token_s(llm, new_schema())))
        added = [masked - plain for plain, masked in firsts]
        print(f"time to first token, plain: {spread([each for each, _ in firsts], 1e3)} ms")
        print(f"with a new schema of {NUM_PROPERTIES} properties: {spread(added, 1e3)} ms more")

    def decode(constraint: StructuredOutputsParams | None) -> Timing:
        return run(llm, num_seqs, num_tokens, constraint)

    plain_and_masked = list(turns(num_turns, lambda: decode(None), lambda: decode(new_schema())))
    steps = [masked.num_tokens / masked.num_steps / num_seqs for _, masked in plain_and_masked]
    print(f"jump-forward {'on' if jumps_forward else 'off'}: {spread(steps, 1)} tokens per step and sequence")
    for name in ("wall_s", "cpu_s"):
        pairs = [(getattr(plain, name) / plain.num_tokens, getattr(masked, name) / masked.num_tokens)
                 for plain, masked in plain_and_masked]  # fmt: skip
        print(f"  {name[:-2]} per token and sequence: plain {spread([each for each, _ in pairs], 1e6)} us,", end=" ")
        print(f"with the schema {spread([masked - plain for plain, masked in pairs], 1e6)} us more")


if __name__ == "__main__":
    typer.run(main)
