"""Addends of adapters: the reference, single ops by PyTorch, and rows that depend on their own adapter alone."""

import pytest
import torch

from quire.kernels.linear_weight import LinearWeight
from quire.kernels.low_rank import RowAdapters
from quire.kernels.quantized import round_to_nearest
from quire.kernels.reference.linear import TorchUp, make_linear, reference
from quire.kernels.reference.linear import low_rank_addend as addend_of
from support.adapters import adapter, random_layer

WIDTH, OUTPUTS = 40, 72


def test_scale_is_folded_in_before_rounding() -> None:
    x, down, up = torch.ones(1, 2), torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0], [-2.0]])
    assert addend_of(x, down, up, 0.5).tolist() == [[1.5, -3.0]]
    found = addend_of(x.bfloat16(), down.bfloat16(), torch.tensor([[1 + 2**-7]]), 1 + 2**-7)
    assert found.item() == 3 * (1 + 2**-6)  # B and its scale are rounded once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_addend_of_fused_parts_has_those_of_each_module(dtype: torch.dtype) -> None:
    ranges = [(0, 16, 4), (32, 40, 3)]
    layer, factors = random_layer(make_linear, TorchUp, WIDTH, OUTPUTS, ranges, dtype, seed=1)
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = layer.addend(x)
    for (first, count, _), (down, up) in zip(ranges, factors, strict=True):
        expected = addend_of(x, down, up.float(), 1.0)
        torch.testing.assert_close(found[:, first : first + count], expected, rtol=2e-2, atol=2e-2)
    assert (found[:, 16:32].view(torch.int32) == torch.tensor(-0.0).view(torch.int32)).all()


@pytest.mark.parametrize("weight_format", ["dense", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_depend_on_their_own_adapter_alone(dtype: torch.dtype, weight_format: str) -> None:
    generator = torch.Generator().manual_seed(3)
    values = (torch.randn(OUTPUTS, WIDTH, generator=generator) * WIDTH**-0.5).to(dtype)
    is_dense = weight_format == "dense"
    weight = LinearWeight.dense(values)
    if not is_dense:
        weight = round_to_nearest(values, weight_format, 32, activation_group_size=8)
    layer = make_linear(weight)
    x = torch.randn(70, WIDTH, generator=generator).to(dtype)
    x[1] = 0.0
    layers = [
        random_layer(make_linear, TorchUp, WIDTH, OUTPUTS, [(0, OUTPUTS, rank)], dtype, seed=rank)[0]
        for rank in (2, 16)
    ]
    adapters = [adapter(up=each) for each in layers] + [adapter()]
    of_row = torch.arange(-1, 69, dtype=torch.int32) % 4 - 1
    addend = RowAdapters(adapters, of_row).addend("up", x)
    assert addend is not None
    mixed, plain = layer(x, addend), layer(x)
    for index in range(-1, 3):
        rows = of_row == index
        if index in (-1, 2):
            assert torch.equal(mixed[rows].view(torch.uint8), plain[rows].view(torch.uint8))
        else:
            assert torch.equal(mixed[rows], layer(x[rows], layers[index].addend(x[rows])))
            expected = reference(x[rows], weight, addend=layers[index].addend(x[rows]))
            torch.testing.assert_close(mixed[rows], expected, rtol=2e-2, atol=5e-2)
    assert RowAdapters(adapters, of_row).addend("down", x) is None
