"""The C++ linear kernels alone: quantized weights beside bfloat16, in turns in one run.

    python bench/quantized_linear.py [--isa avx2] [--threads 2] [--rows 1,16,64,2048] [--layers 24] [--head]
    python bench/quantized_linear.py --threads 1 --formats q8_0,q4_0,fp8    # some formats

The layers of bench-0.5b, one after the other as in a step: qkv, attention output, gate and up with their product, down;
or with --head the output head alone. One row is bound by reading, so the packed weights are also read plainly, in the
same run; many rows are bound by arithmetic. Medians, and in brackets the quartiles: of wall time, or with one thread of
the time that it ran, so that other processes matter little.
"""

import statistics
from typing import Annotated, NamedTuple

import numpy as np
import typer

from bench_attention import clock_of_threads, in_turns, random_values, read, spread
from quire.core.arrays import BFLOAT16, FLOAT32, UINT8, Array
from quire.extension import _kernels
from quire.extension.isas import set_threads_of_kernels
from quire.kernels.cpp.cpp_linear import CppLinear
from quire.kernels.cpp.cpp_packing import PackedMemory
from quire.kernels.layers import Activation
from quire.kernels.linear_weight import LinearWeight

WIDTH = 896
Shape = tuple[int, int, Activation]  # outputs, inputs
SHAPES: list[Shape] = [
    (WIDTH + 256, WIDTH, "none"), (WIDTH, WIDTH, "none"), (2 * 4864, WIDTH, "silu_and_mul"), (WIDTH, 4864, "none"),
]  # fmt: skip
HEAD: list[Shape] = [(151_936, WIDTH, "none")]
WHOLE = 1 << 20  # a group longer than any row


class Format(NamedTuple):
    """Format of weights, and the inputs that share a scale of int8 activations: 0 where they are expanded."""

    element: str
    group: int = WHOLE
    activations: int = 0
    correction: str = "constant"


FORMATS = {
    "bfloat16": Format("dense"),
    "int8 in groups of 128": Format("int8", 128, 128),
    "int8 in groups of 256": Format("int8", 256, 256),
    "int8 by rows": Format("int8", WHOLE, 256),
    "int4 in groups of 128": Format("int4", 128, 128),
    "int4 in groups of 64": Format("int4", 64, 64),
    "int4 by rows": Format("int4", WHOLE, 256),
    "Q8_0": Format("int8", 32, 32),
    "Q4_0": Format("int4", 32, 32),
    "Q4_K": Format("int4", 32, 32, "minimums"),
    "Q6_K": Format("int8", 16, 16),
    "Q8_0 expanded": Format("int8", 32),
    "Q4_0 expanded": Format("int4", 32),
    "Q4_K expanded": Format("int4", 32, correction="minimums"),
    "Q6_K expanded": Format("int8", 16),
    "int8 in groups of 128 expanded": Format("int8", 128),
    "int4 in groups of 128 expanded": Format("int4", 128),
    "int4 with zeros expanded": Format("int4", 128, correction="zeros"),
    "fp8 by rows": Format("fp8"),
    "fp8 in groups of 128": Format("fp8", 128),
    "codebook in groups of 64": Format("codebook4", 64),
}


def random_weight(out: int, width: int, form: Format) -> LinearWeight:
    """Return a weight [out, width] of random elements; their scales make it about as large as a trained one."""
    generator = np.random.default_rng(0)
    if form.element == "dense":
        return LinearWeight.dense(random_values((out, width), BFLOAT16))
    top = 16 if form.element in ("int4", "codebook4") else 120 if form.element == "fp8" else 256
    elements = generator.integers(top, size=(out, width), dtype=UINT8)
    grouped = out, -(-width // min(form.group, width))
    offsets: Array | int | None = None
    if form.element in ("int8", "int4") and form.correction != "minimums":
        offsets = top // 2 if form.correction == "constant" else generator.integers(top, size=grouped, dtype=UINT8)
    return LinearWeight(
        form.element, (elements,), out, width, generator.random(grouped, FLOAT32) / top, offsets, form.group,
        activation_group_size=form.activations,
        minimums=generator.random(grouped, FLOAT32) if form.correction == "minimums" else None,
        codebook=np.linspace(-1, 1, 16, dtype=FLOAT32) if form.element == "codebook4" else None, dtype=BFLOAT16,
    )  # fmt: skip


class Step:
    """All layers in one format."""

    def __init__(self, shapes: list[Shape], num_layers: int, form: Format) -> None:
        memory = PackedMemory()
        self.layers = []
        for out, width, activation in shapes:
            weight = random_weight(out, width, form)
            self.layers.append([CppLinear(weight, activation=activation, memory=memory) for _ in range(num_layers)])
        self.num_bytes = sum(layer.num_bytes for layers in self.layers for layer in layers)
        self.packed = [layer._weight.packed for layers in self.layers for layer in layers]

    def multiply(self, rows: dict[int, Array]) -> None:
        for layers in zip(*self.layers, strict=True):
            for layer in layers:
                layer(rows[layer.sizes[0]])


def bench(steps: dict[str, Step], num_rows: int, macs: int, repeats: int) -> None:
    rows = {width: random_values((num_rows, width), BFLOAT16) for width in (WIDTH, 4864)}
    calls = [lambda step=step: step.multiply(rows) for step in steps.values()]
    reads = [lambda step=step: read(step.packed) for step in steps.values()] if num_rows == 1 else []
    times = in_turns(calls + reads, repeats, clock_of_threads())
    base = statistics.median(times[0])
    for i, (name, step) in enumerate(steps.items()):
        ms, median = [s * 1e3 for s in times[i]], statistics.median(times[i])
        line = f"{num_rows:5} rows {name:30} ms {spread(ms)}, of bfloat16 {median / base:.3f}, "
        line += f"GB/s {step.num_bytes / median * 1e-9:.1f}, GMAC/s {macs * num_rows / median * 1e-9:.1f}"
        if reads:
            line += f", plain read ms {spread([s * 1e3 for s in times[len(calls) + i]])}"
        print(line, flush=True)


def main(
    isa: Annotated[str, typer.Option(help="instruction set, as in --cpu-isa")] = _kernels.usable_isas()[0],
    threads: Annotated[int, typer.Option(help="threads of the kernels")] = 2,
    rows: Annotated[str, typer.Option(help="numbers of rows, with commas")] = "1,16,64,2048",
    layers: Annotated[int, typer.Option(help="layers of each shape")] = 24,
    head: Annotated[bool, typer.Option(help="the output head alone")] = False,
    formats: Annotated[str, typer.Option(help="words of the formats to measure beside bfloat16, with commas")] = "",
    repeats: Annotated[int, typer.Option(help="timed rounds")] = 15,
) -> None:
    """Measure and print."""
    _kernels.use_isa(isa)
    set_threads_of_kernels(threads)
    shapes, num_layers = (HEAD, 1) if head else (SHAPES, layers)
    wanted = [word.lower() for word in formats.split(",")]
    chosen = {
        name: form for name, form in FORMATS.items() if name == "bfloat16" or any(w in name.lower() for w in wanted)
    }
    steps = {name: Step(shapes, num_layers, form) for name, form in chosen.items()}
    macs = num_layers * sum(out * width for out, width, _ in shapes)
    print(f"{isa}, {threads} threads, {'the head' if head else f'{layers} layers'}")
    for num_rows in map(int, rows.split(",")):
        bench(steps, num_rows, macs, repeats if num_rows < 256 else max(3, repeats // 3))


if __name__ == "__main__":
    typer.run(main)
