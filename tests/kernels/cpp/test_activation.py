"""Gated activations in C++ against the plain ones, at the ends of the range too."""

import math

import pytest
import torch

from quire.kernels import activation
from quire.kernels.cpp.activation import silu_and_mul

DTYPES = [(torch.float32, 2e-6), (torch.bfloat16, 8e-3), (torch.float16, 2e-3)]


@pytest.mark.parametrize(("dtype", "tol"), DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 15, 16, 172, 4864])
def test_kernel_matches_the_plain_op(width: int, dtype: torch.dtype, tol: float) -> None:
    gate_up = (torch.randn(9, 2 * width, generator=torch.Generator().manual_seed(width)) * 4).to(dtype)
    torch.testing.assert_close(silu_and_mul(gate_up), activation.silu_and_mul(gate_up), rtol=tol, atol=tol)


def test_rows_have_the_same_bits_among_any_others() -> None:
    gate_up = torch.randn(33, 2 * 77)
    assert torch.equal(silu_and_mul(gate_up), torch.cat([silu_and_mul(row[None]) for row in gate_up]))


def test_no_gate_is_out_of_range() -> None:
    gates = torch.tensor([[-math.inf, -1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30]])
    found = silu_and_mul(torch.cat([gates, torch.ones_like(gates)], dim=1))[0].tolist()
    assert found[1:5] == pytest.approx([0.0, 0.0, 0.0, 0.0], abs=1e-30)
    assert found[5:] == [88.0, 200.0, pytest.approx(1e30)]
    assert math.isnan(silu_and_mul(torch.tensor([[math.nan, 1.0]])).item())


def test_exponential_is_accurate_over_its_whole_range() -> None:
    """silu(-x) * 1 = -x / (1 + exp(x)): where exp dominates, the quotient shows its relative error."""
    x = torch.linspace(20.0, 80.0, 100_000, dtype=torch.float64)
    gates = -x.float()[None]
    found = silu_and_mul(torch.cat([gates, torch.ones_like(gates)], dim=1))[0].double()
    wide = -gates[0].double()
    expected = -wide / (1 + wide.exp())
    assert ((found - expected) / expected).abs().max() < 4e-7
