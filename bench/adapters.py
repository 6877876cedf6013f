"""LoRA adapters: the cost of a step with them, beside the same step without.

    python bench/adapters.py MODEL [--rank 16] [--threads N] [--turns 5]

Decoding of greedy tokens: one row with one adapter, and 32 rows with one, and with 8 adapters in turn. Each is compared
with the same rows without adapters on the same engine, in turns A B, B A; a figure is the median over turns of the
ratio within a turn, with its extremes. The adapters are random, of all linear layers of attention and feed-forward.
`--threads 1` counts CPU time, so that other processes matter little.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors import safe_open
from safetensors.torch import save_file

from quire import LLM, LoRARequest, SamplingParams
from quire.core.model_files import read_json_object
from quire.extension.isas import set_threads_of_kernels
from quire_lab.bench.report import machine_facts

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPT_LEN = 16
Adapters = Sequence[LoRARequest | None]


def main(
    model: Annotated[Path, typer.Argument(help="folder of a Llama, Mistral or Qwen in one file of safetensors")],
    rank: int = 16,
    turns: int = 5,
    tokens: Annotated[int, typer.Option(help="decoded in each measurement")] = 48,
    threads: Annotated[int, typer.Option(help="0: as many as there are")] = 0,
    dtype: str = "bfloat16",
    quantization: str = "",
) -> None:
    """Print the cost of steps with adapters."""
    if threads:
        set_threads_of_kernels(threads)
    print(machine_facts(), f"rank {rank}, {dtype} {quantization}".strip(), sep="\n")
    with tempfile.TemporaryDirectory() as folder:
        adapters = [write_adapter(model, Path(folder) / str(number), number, rank) for number in range(8)]
        options = {"quantization": quantization} if quantization else {}
        with LLM(model, dtype=dtype, enable_lora=True, max_loras=8, max_lora_rank=rank, max_model_len=1024,
                 enable_prefix_caching=False, **options) as llm:  # fmt: skip
            clock = time.process_time if threads == 1 else time.perf_counter
            cases: list[tuple[str, Adapters]] = [
                ("1 row, 1 adapter", adapters[:1]),
                ("32 rows, 1 adapter", adapters[:1] * 32),
                ("32 rows, 8 adapters", adapters * 4),
                ("32 rows, one of them with an adapter", [adapters[0], *[None] * 31]),
            ]
            for name, asked in cases:
                ratios = [ratio(llm, asked, tokens, clock, is_first=turn % 2 == 0) for turn in range(turns + 1)][1:]
                low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
                print(f"{name}: {100 * (middle - 1):+.1f} % ({100 * (low - 1):+.1f} to {100 * (high - 1):+.1f})")


def ratio(llm: LLM, asked: Adapters, tokens: int, clock: Callable[[], float], *, is_first: bool) -> float:
    """Return the time with adapters by the time without; `is_first`: the measurement with them is the first."""
    plain: Adapters = [None] * len(asked)
    times = {which: decode(llm, own, tokens, clock) for which, own in sorted({True: asked, False: plain}.items(),
             key=lambda pair: pair[0] != is_first)}  # fmt: skip
    return times[True] / times[False]


def decode(llm: LLM, asked: Adapters, tokens: int, clock: Callable[[], float]) -> float:
    """Return the seconds of the steps behind the prompts."""
    prompts = [[3 + (row * 7 + i) % 90 for i in range(PROMPT_LEN)] for row in range(len(asked))]
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    started: float | None = None
    seen = set[str]()
    for output in llm.stream(prompts, params, lora_request=asked):
        seen.add(output.request_id)
        if started is None and len(seen) == len(asked):
            started = clock()
    assert started is not None, "no step had all rows"
    return clock() - started


def write_adapter(model: Path, folder: Path, seed: int, rank: int) -> LoRARequest:
    """Write an adapter with random factors of all layers."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    layers = read_json_object(model, "config.json")["num_hidden_layers"]
    with safe_open(model / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (of safe_open)
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] not in MODULES:
                continue
            num_outputs, num_inputs = file.get_slice(name).get_shape()
            stem = f"base_model.model.{module}.lora_"
            tensors[f"{stem}A.weight"] = torch.randn(rank, num_inputs, generator=generator) / num_inputs**0.5
            tensors[f"{stem}B.weight"] = torch.randn(num_outputs, rank, generator=generator) / 100
    assert len(tensors) == 2 * len(MODULES) * int(str(layers)), "a model with other names of modules"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(f'{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {rank}}}')
    return LoRARequest(folder.name, seed + 1, str(folder))


if __name__ == "__main__":
    typer.run(main)
