"""Adapters in the C++ interpreter: the bits of single ops, for any mixture of rows."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from quire.kernels.cpp.cpp_packing import PackedMemory
from quire.kernels.cpp.fused_ops import FusedOps, fuse
from quire.kernels.layers import GATED, Activation
from quire.kernels.linear_weight import LinearWeight
from quire.kernels.low_rank import AdapterWeights, RowAdapters
from quire.kernels.paged_attention import build_metadata
from quire.kernels.program import INPUT, LayerInputs, LinearOp, NormOp, Program
from quire.kernels.quantized import round_to_nearest
from support.adapters import adapter, random_layer
from support.cpp_kernels import CppLinear, CppNorm, CppUp
from support.on_tensors import arrays, tensors

WIDTH, INNER = 48, 88


def program_of(weight_format: str, dtype: torch.dtype, activation: Activation) -> Program:
    """Return a norm, a fused layer with an activation, and one back."""
    memory, generator = PackedMemory(), torch.Generator().manual_seed(5)

    def layer(num_inputs: int, num_outputs: int, activation: Activation) -> CppLinear:
        rows = num_outputs * (2 if activation in GATED else 1)
        values = (torch.randn(rows, num_inputs, generator=generator) * num_inputs**-0.5).to(dtype)
        bias = torch.randn(rows, generator=generator).to(dtype)
        weight = LinearWeight.dense(values)
        if weight_format != "dense":
            weight = round_to_nearest(values, weight_format, 32, activation_group_size=8)
        return CppLinear(weight, bias, activation=activation, memory=memory)

    return Program(
        (
            NormOp("norm", CppNorm(torch.ones(WIDTH, dtype=dtype), None, 1e-5, False), INPUT, "x"),
            LinearOp("up", layer(WIDTH, INNER, activation), "x", "inner"),
            LinearOp("down", layer(INNER, WIDTH, "none"), "inner", "out"),
        ),
        "out",
    )


def adapters_for(dtype: torch.dtype, activation: Activation) -> list[AdapterWeights]:
    """Return adapters of both layers, of some outputs of one, of the other one, and of neither."""
    make: Callable[..., CppLinear] = partial(CppLinear, memory=PackedMemory())
    outputs = INNER * (2 if activation in GATED else 1)
    whole = random_layer(make, CppUp, WIDTH, outputs, [(0, outputs, 5)], dtype, seed=1)[0]
    parts = random_layer(make, CppUp, WIDTH, outputs, [(0, 24, 16), (40, outputs - 40, 33)], dtype, seed=2)[0]
    down = random_layer(make, CppUp, INNER, WIDTH, [(0, WIDTH, 1)], dtype, seed=3)[0]
    return [adapter(up=whole, down=down), adapter(up=parts), adapter(down=down), adapter()]


def run(program: Program, x: Tensor, adapters: RowAdapters | None) -> Tensor:
    one = torch.zeros(1, 1, dtype=torch.int32)
    metadata = build_metadata(one, torch.tensor([0, len(x)], dtype=torch.int32), torch.tensor([len(x)]).int(), 8)
    places = torch.zeros(len(x), dtype=torch.int64)
    inputs = LayerInputs(*arrays((places, places, metadata)), [], [], adapters=arrays_of(adapters))
    found: Tensor = tensors(program.run(arrays(x.clone()), inputs))
    return found


def arrays_of(adapters: RowAdapters | None) -> RowAdapters | None:
    return None if adapters is None else adapters._replace(of_row=arrays(adapters.of_row))


def same_bits(x: Tensor, y: Tensor) -> bool:
    x, y = x.contiguous(), y.contiguous()
    return x.shape == y.shape and (not len(x) or torch.equal(x.view(torch.uint8), y.view(torch.uint8)))


@pytest.mark.parametrize("num_threads", [2], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("weight_format", "activation"),
    [("dense", "silu_and_mul"), ("dense", "gelu"), ("int8", "gelu_tanh_and_mul"), ("int4", "none")],
)
@pytest.mark.usefixtures("num_threads")
def test_fused_rows_have_the_bits_of_single_ops_and_of_their_own_adapter(
    weight_format: str, activation: Activation, dtype: torch.dtype
) -> None:
    program = program_of(weight_format, dtype, activation)
    fused = fuse(program)
    assert [type(op) for op in fused.ops] == [FusedOps]
    adapters, generator = adapters_for(dtype, activation), torch.Generator().manual_seed(7)
    for num_rows in (1, 3, 33, 300):
        x = torch.randn(num_rows, WIDTH, generator=generator).to(dtype)
        of_row = torch.randint(-1, len(adapters), (num_rows,), generator=generator, dtype=torch.int32)
        mixed = run(fused, x, RowAdapters(adapters, of_row))
        assert same_bits(mixed, run(program, x, RowAdapters(adapters, of_row)))
        plain = run(fused, x, None)
        for index in range(-1, len(adapters)):
            own = of_row == index
            alone = run(fused, x[own], RowAdapters(adapters, of_row[own]))
            assert same_bits(mixed[own], alone)
            assert same_bits(mixed[own], plain[own]) == (index in (-1, 3) or not own.any())


def test_adapter_that_was_freed_leaves_nothing_behind() -> None:
    fused = fuse(program_of("dense", torch.float32, "none"))
    x, of_row = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1)), torch.tensor([0, -1]).int()
    found = []
    for _ in range(2):
        own = adapters_for(torch.float32, "none")[:1]
        found.append(run(fused, x, RowAdapters(own, of_row)))
        del own
    assert same_bits(*found)
    (op,) = fused.ops
    assert isinstance(op, FusedOps)
    assert not len(op._factors)
