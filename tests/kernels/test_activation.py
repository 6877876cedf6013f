"""Activations against torch's, and each element to the bit against itself elsewhere in a tensor."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.reference.activation import (
    clamped_silu_and_mul,
    gelu,
    gelu_and_mul,
    gelu_tanh,
    gelu_tanh_and_mul,
    quick_gelu,
    relu,
    silu_and_mul,
)

Activation = Callable[[Tensor], Tensor]
DTYPES = [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)]
PLAIN = [
    (gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
    (gelu, F.gelu),
    (quick_gelu, lambda x: x * torch.sigmoid(1.702 * x)),
    (relu, F.relu),
]


def silu(x: Tensor) -> Tensor:
    """The gated activation with a gate of x and nothing to multiply by."""
    return silu_and_mul(torch.cat([x, torch.ones_like(x)], dim=-1))


def values(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(count, generator=torch.Generator().manual_seed(0)) * 4
    x[:8] = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 90.0, -90.0, 6e4, -6e4])
    return x.to(dtype)


@pytest.mark.parametrize(("dtype", "tol"), DTYPES, ids=str)
@pytest.mark.parametrize(("ours", "theirs"), [*PLAIN, (silu, F.silu)])
def test_activation_matches_torch(ours: Activation, theirs: Activation, dtype: torch.dtype, tol: float) -> None:
    x = values(5000, dtype)
    result = ours(x)
    assert result.dtype == dtype
    torch.testing.assert_close(result, theirs(x.double()).to(dtype), rtol=tol, atol=tol)


@pytest.mark.parametrize(("dtype", "tol"), DTYPES, ids=str)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (silu_and_mul, F.silu),
        (gelu_and_mul, F.gelu),
        (gelu_tanh_and_mul, lambda x: F.gelu(x, approximate="tanh")),
    ],
)
def test_gate_multiplies_the_second_half(
    ours: Activation, theirs: Activation, dtype: torch.dtype, tol: float
) -> None:
    gate_up = values(6 * 86, dtype).clamp(-50, 50).view(6, 86)
    gate, up = gate_up.double().chunk(2, dim=-1)
    torch.testing.assert_close(ours(gate_up), (theirs(gate) * up).to(dtype), rtol=2 * tol, atol=tol)


@pytest.mark.parametrize(("dtype", "tol"), DTYPES, ids=str)
def test_clamped_gate_is_at_most_7_and_the_second_half_from_minus_7_to_7(dtype: torch.dtype, tol: float) -> None:
    gate_up = values(6 * 86, dtype).clamp(-50, 50).view(6, 86)
    gate, up = gate_up.double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    expected = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    torch.testing.assert_close(clamped_silu_and_mul(gate_up), expected.to(dtype), rtol=2 * tol, atol=tol)


@pytest.mark.parametrize("num_threads", [1, 2], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", [gelu_tanh, gelu, quick_gelu, relu, silu])
def test_elements_have_the_same_bits_wherever_they_stand(
    activation: Activation, dtype: torch.dtype, num_threads: int
) -> None:
    x = values(100_000, dtype)
    whole = activation(x)
    for count in range(1, 101):
        for begin in (0, 1, 7, 50_001):
            assert torch.equal(activation(x[begin : begin + count]), whole[begin : begin + count])
    assert torch.equal(activation(x[::3]), whole[::3])
    assert torch.equal(activation(x.view(1000, 100)[:, 3:30]), whole.view(1000, 100)[:, 3:30])


@pytest.mark.parametrize("width", [8, 43, 172, 1000])
def test_gated_rows_have_the_same_bits_among_any_others(width: int) -> None:
    gate_up = values(200 * 2 * width).view(200, 2 * width)
    together = silu_and_mul(gate_up)
    assert torch.equal(torch.cat([silu_and_mul(row[None]) for row in gate_up]), together)
    assert torch.equal(silu_and_mul(gate_up[5:70]), together[5:70])
