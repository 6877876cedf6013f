"""Activations on their way out of a linear layer in C++ against the plain ones, at the ends of the range too."""

import math

import pytest
import torch
from torch import Tensor

from quire.kernels.layers import Activation
from quire.kernels.linear_weight import LinearWeight
from quire.kernels.reference import activation
from support.cpp_kernels import CppLinear
from support.pairwise import covering

dense = LinearWeight.dense

DTYPES = [(torch.float32, 2e-6), (torch.bfloat16, 8e-3), (torch.float16, 2e-3)]


def activated(x: Tensor, name: Activation, bias: Tensor | None = None) -> Tensor:
    """Activate x [num_rows, width] by a layer whose weight is the identity: its sums are x."""
    return CppLinear(dense(torch.eye(x.shape[1], dtype=x.dtype)), bias, activation=name)(x)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return activated(gate_up, "silu_and_mul")


@covering(
    {
        "name": ["silu_and_mul", "gelu_tanh_and_mul", "gelu_tanh", "gelu", "quick_gelu", "relu", "relu2"],
        "width": [1, 15, 16, 172, 520],
        "has_bias": [False, True],
        ("dtype", "tol"): DTYPES,
    },
)
def test_layer_matches_the_plain_op(
    name: Activation, width: int, has_bias: bool, dtype: torch.dtype, tol: float
) -> None:
    generator = torch.Generator().manual_seed(width)
    x, bias = torch.randn(70, 2 * width, generator=generator) * 4, torch.randn(2 * width, generator=generator)
    x, bias = x.to(dtype), bias.to(dtype) * has_bias
    expected = getattr(activation, name)(x + bias)
    torch.testing.assert_close(activated(x, name, bias if has_bias else None), expected, rtol=tol, atol=tol)


@pytest.mark.parametrize(("dtype", "tol"), DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("width", [1, 16, 172])
def test_gelu_of_gates_matches_the_plain_op(width: int, has_bias: bool, dtype: torch.dtype, tol: float) -> None:
    """The up, of up to 15, multiplies the error of a gate, which is that of the test above."""
    generator = torch.Generator().manual_seed(width)
    x, bias = torch.randn(70, 2 * width, generator=generator) * 4, torch.randn(2 * width, generator=generator)
    x, bias = x.to(dtype), bias.to(dtype) * has_bias
    expected = activation.gelu_and_mul(x + bias)
    found = activated(x, "gelu_and_mul", bias if has_bias else None)
    up = (x + bias)[:, width:].float().abs()
    error = (found.float() - expected.float()).abs()
    assert bool((error <= tol * (up + expected.float().abs()).clamp(min=1)).all())


@pytest.mark.parametrize(("dtype", "tol"), DTYPES, ids=str)
def test_clamped_gate_matches_the_plain_op(dtype: torch.dtype, tol: float) -> None:
    """float16 sums are not rounded before they are activated, and the gate, of up to 7, multiplies the difference."""
    x = torch.randn(70, 2 * 172, generator=torch.Generator().manual_seed(1)) * 6
    expected = activation.clamped_silu_and_mul(x.to(dtype))
    found = activated(x.to(dtype), "clamped_silu_and_mul")
    torch.testing.assert_close(found, expected, rtol=tol, atol=7 * tol)
    assert math.isnan(activated(torch.tensor([[math.nan, 1.0]]), "clamped_silu_and_mul").item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name",
    ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "clamped_silu_and_mul", "gelu_tanh", "gelu", "quick_gelu"],
)
def test_rows_have_the_same_bits_among_any_others(name: Activation, dtype: torch.dtype) -> None:
    x = torch.randn(90, 2 * 77).to(dtype)
    alone = torch.cat([activated(row[None], name) for row in x])
    for num_rows in (5, 33, 90):
        assert torch.equal(activated(x[:num_rows], name), alone[:num_rows])


def test_sums_are_rounded_before_they_are_activated() -> None:
    """As a layer without an activation would have stored them: fused or not, the bits are the same."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(20, 96, generator=generator), torch.randn(64, 96, generator=generator)
    x, weight = x.bfloat16(), weight.bfloat16()
    found = CppLinear(dense(weight), activation="silu_and_mul")(x)
    assert torch.equal(found, silu_and_mul(CppLinear(dense(weight))(x)))


def test_no_gate_is_out_of_range() -> None:
    gates = torch.tensor([[-math.inf, -1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30]])
    found = torch.cat([silu_and_mul(torch.stack([gate, torch.ones(())])[None])[0] for gate in gates[0]]).tolist()
    assert math.isnan(found[0])
    assert found[1:5] == pytest.approx([0.0, 0.0, 0.0, 0.0], abs=1e-30)
    assert found[5:] == [88.0, 200.0, pytest.approx(1e30)]
    assert math.isnan(silu_and_mul(torch.tensor([[math.nan, 1.0]])).item())


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_gelu_is_one_or_nothing_far_from_zero(name: Activation) -> None:
    x = torch.tensor([[-1e30, -60.0, -20.0, 0.0, 20.0, 60.0, 1e15]])
    found = torch.cat([activated(value[None, None], name)[0] for value in x[0]]).tolist()
    assert found == [0.0, 0.0, pytest.approx(0.0, abs=1e-30), 0.0, 20.0, 60.0, pytest.approx(1e15)]


def test_exponential_is_accurate_over_its_whole_range() -> None:
    """silu(-x) * 1 = -x / (1 + exp(x)): where exp dominates, the quotient shows its relative error."""
    x = torch.linspace(20.0, 80.0, 100_000, dtype=torch.float64)
    gates = -x.float()
    found = silu_and_mul(torch.stack([gates, torch.ones_like(gates)], dim=1))[:, 0].double()
    wide = -gates.double()
    expected = -wide / (1 + wide.exp())
    assert ((found - expected) / expected).abs().max() < 4e-7
