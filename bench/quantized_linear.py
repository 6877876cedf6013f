"""The C++ linear kernels alone: int8 and int4 weights with int8 activations beside bfloat16, in turns in one run.

    python bench/quantized_linear.py [--isa avx2] [--threads 2] [--rows 1,16,64,2048] [--layers 24] [--head]

The layers of bench-0.5b, one after the other as in a step: qkv, attention output, gate and up with their product, down;
or with --head the output head alone. One row is bound by reading, so the packed weights are also read plainly, in the
same run; many rows are bound by arithmetic. Medians, and in brackets the quartiles.
"""

import statistics
from typing import Annotated

import torch
import typer

from bench_attention import in_turns, spread
from quire.kernels.cpp import _kernels
from quire.kernels.cpp.huge_pages import PackedMemory
from quire.kernels.cpp.linear import CppLinear
from quire.kernels.linear import Activation
from quire.kernels.linear_weight import LinearWeight
from quire.kernels.quantized import round_to_nearest

WIDTH = 896
Shape = tuple[int, int, Activation]  # outputs, inputs
SHAPES: list[Shape] = [
    (WIDTH + 256, WIDTH, "none"), (WIDTH, WIDTH, "none"), (2 * 4864, WIDTH, "silu_and_mul"), (WIDTH, 4864, "none"),
]  # fmt: skip
HEAD: list[Shape] = [(151_936, WIDTH, "none")]
FORMATS = {
    "bfloat16": ("dense", 0), "int8 in groups of 128": ("int8", 128), "int8 in groups of 256": ("int8", 256),
    "int8 by rows": ("int8", 1 << 20), "int4 in groups of 128": ("int4", 128), "int4 in groups of 64": ("int4", 64),
}  # fmt: skip


class Step:
    """All layers in one format."""

    def __init__(self, shapes: list[Shape], num_layers: int, weight_format: str, group: int) -> None:
        memory = PackedMemory()
        self.layers = []
        for out, width, activation in shapes:
            dense = torch.randn(out, width, generator=torch.Generator().manual_seed(0)).bfloat16()
            weight = LinearWeight.dense(dense)
            if weight_format != "dense":
                weight = round_to_nearest(dense, weight_format, group, activation_group_size=group)
            self.layers.append([CppLinear(weight, activation=activation, memory=memory) for _ in range(num_layers)])
        self.num_bytes = sum(layer.num_bytes for layers in self.layers for layer in layers)
        self.words = [layer._weight.packed.view(torch.int32) for layers in self.layers for layer in layers]

    def multiply(self, rows: dict[int, torch.Tensor]) -> None:
        for layers in zip(*self.layers, strict=True):
            for layer in layers:
                layer(rows[layer.sizes[0]])

    def read(self) -> None:
        for words in self.words:
            words.sum()


def bench(steps: dict[str, Step], num_rows: int, macs: int, repeats: int) -> None:
    rows = {width: torch.randn(num_rows, width).bfloat16() for width in (WIDTH, 4864)}
    calls = [lambda step=step: step.multiply(rows) for step in steps.values()]
    reads = [step.read for step in steps.values()] if num_rows == 1 else []
    times = in_turns(calls + reads, repeats)
    base = statistics.median(times[0])
    for i, (name, step) in enumerate(steps.items()):
        ms, median = [s * 1e3 for s in times[i]], statistics.median(times[i])
        line = f"{num_rows:5} rows {name:22} ms {spread(ms)}, of bfloat16 {median / base:.3f}, "
        line += f"GB/s {step.num_bytes / median * 1e-9:.1f}, GMAC/s {macs * num_rows / median * 1e-9:.1f}"
        if reads:
            line += f", plain read ms {spread([s * 1e3 for s in times[len(calls) + i]])}"
        print(line, flush=True)


def main(
    isa: Annotated[str, typer.Option(help="instruction set, as of --cpu-isa")] = _kernels.usable_isas()[0],
    threads: Annotated[int, typer.Option(help="threads of the kernels")] = 2,
    rows: Annotated[str, typer.Option(help="numbers of rows, with commas")] = "1,16,64,2048",
    layers: Annotated[int, typer.Option(help="layers of each shape")] = 24,
    head: Annotated[bool, typer.Option(help="the output head alone")] = False,
    formats: Annotated[str, typer.Option(help="words of the formats to measure beside bfloat16, with commas")] = "",
    repeats: Annotated[int, typer.Option(help="timed rounds")] = 15,
) -> None:
    """Measure and print."""
    _kernels.use_isa(isa)
    torch.set_num_threads(threads)
    shapes, num_layers = (HEAD, 1) if head else (SHAPES, layers)
    chosen = {
        name: form for name, form in FORMATS.items() if name == "bfloat16" or any(w in name for w in formats.split(","))
    }
    steps = {name: Step(shapes, num_layers, *form) for name, form in chosen.items()}
    macs = num_layers * sum(out * width for out, width, _ in shapes)
    print(f"{isa}, {threads} threads, {'the head' if head else f'{layers} layers'}")
    for num_rows in map(int, rows.split(",")):
        bench(steps, num_rows, macs, repeats if num_rows < 256 else max(3, repeats // 3))


if __name__ == "__main__":
    typer.run(main)
