"""RMSNorm and LayerNorm in C++ against the plain ones, and to the bit among other rows."""

import pytest
import torch
from torch import Tensor

from quire.kernels.layers import Norm
from quire.kernels.reference import norm
from support.cpp_kernels import CppNorm
from support.pairwise import covering

DTYPES = [(torch.float32, 4e-6), (torch.bfloat16, 1.6e-2), (torch.float16, 2e-3)]
KINDS = ["rms", "layer", "layer without bias", "rms with weights in float32", "rms with 1 + weight"]
OFFSETS = {"rms with weights in float32": 0.0, "rms with 1 + weight": 1.0}


def parameters(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width)
    return tuple(torch.randn(width, generator=generator).to(dtype) for _ in range(2))  # type: ignore[return-value]


def plain(kind: str, width: int, dtype: torch.dtype) -> Norm:
    weight, bias = parameters(width, dtype)
    centers = kind.startswith("layer")
    return norm.TorchNorm(weight, bias if kind == "layer" else None, 1e-6, centers, OFFSETS.get(kind))


def ours(kind: str, width: int, dtype: torch.dtype) -> Norm:
    weight, bias = parameters(width, dtype)
    return CppNorm(weight, bias if kind == "layer" else None, 1e-6, kind.startswith("layer"), OFFSETS.get(kind))


def rows(num_rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)) * 3 + 0.5).to(dtype)


@covering(
    {
        "kind": KINDS,
        "width": [1, 8, 17, 64, 896],
        "num_rows": [1, 3, 70],
        "has_residual": [False, True],
        ("dtype", "tol"): DTYPES,
    },
)
def test_kernel_matches_the_plain_op(
    kind: str, width: int, num_rows: int, has_residual: bool, dtype: torch.dtype, tol: float
) -> None:
    x, residual = (rows(num_rows, width, dtype, seed) for seed in (0, 1))
    expected = plain(kind, width, dtype)(x, residual if has_residual else None)
    for found, wanted in zip(ours(kind, width, dtype)(x, residual if has_residual else None), expected, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted, rtol=tol, atol=tol)


@pytest.mark.parametrize(("dtype", "tol"), DTYPES, ids=str)
@pytest.mark.parametrize("centers", [False, True])
def test_heads_with_weights_of_their_own_equal_each_by_itself(
    centers: bool, dtype: torch.dtype, tol: float
) -> None:
    heads, weight = rows(7 * 5, 24, dtype).view(7, 5, 24)[:, 1:4], rows(3, 24, dtype, 1)
    found = CppNorm(weight, None, 1e-5, centers)(heads)[0]
    for head in range(3):
        alone = CppNorm(weight[head], None, 1e-5, centers)(heads[:, head])[0]
        assert torch.equal(found[:, head], alone)
    expected = norm.TorchNorm(weight, None, 1e-5, centers)(heads)[0]
    torch.testing.assert_close(found, expected, rtol=tol, atol=tol)


@pytest.mark.parametrize("num_threads", [1, 2], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_same_bits_among_any_others(kind: str, dtype: torch.dtype, num_threads: int) -> None:
    each = ours(kind, 897, dtype)
    x, residual = (rows(100, 897, dtype, seed) for seed in (0, 1))
    together = each(x.clone(), residual.clone())[0]
    alone = [each(x[i : i + 1].clone(), residual[i : i + 1].clone())[0] for i in range(100)]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(each(x + residual)[0], together)


@pytest.mark.parametrize("kind", KINDS)
def test_sum_is_the_plain_sum_to_the_bit(kind: str) -> None:
    x, residual = (rows(5, 33, torch.bfloat16, seed) for seed in (0, 1))
    expected = x + residual
    assert torch.equal(ours(kind, 33, torch.bfloat16)(x, residual)[1], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mean_far_from_zero_takes_no_digits_from_the_variance(dtype: torch.dtype) -> None:
    x = rows(3, 896, dtype) + 1000
    found, expected = (make("layer", 896, dtype)(x)[0].double() for make in (ours, plain))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_have_gaps_between_them(kind: str) -> None:
    wide, residual = rows(6, 80, torch.float32), rows(6, 50, torch.float32, 1)
    each = ours(kind, 50, torch.float32)
    assert torch.equal(each(wide[:, 7:57])[0], each(wide[:, 7:57].contiguous())[0])
    expected = each(wide[:, 7:57].contiguous(), residual.clone())
    assert all(map(torch.equal, each(wide[:, 7:57], residual), expected))
    assert torch.equal(wide, rows(6, 80, torch.float32)), "only rows without gaps are overwritten"


def test_without_a_residual_the_argument_stays_as_it_is() -> None:
    x = rows(4, 32, torch.float32)
    normed, summed = ours("rms", 32, torch.float32)(x)
    assert summed.data_ptr() == x.data_ptr()
    assert torch.equal(x, rows(4, 32, torch.float32))
    assert not torch.equal(normed, x)


def test_heads_inside_a_wider_projection_are_normed_in_place_of_a_copy() -> None:
    """As query and key norms call it: [num_tokens, num_heads, head_dim], a slice of the fused projection."""
    heads = torch.randn(5, 9, 16)[:, 2:6]
    found = ours("rms", 16, torch.float32)(heads)[0]
    assert found.shape == heads.shape
    torch.testing.assert_close(found, plain("rms", 16, torch.float32)(heads)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_give_no_rows(kind: str) -> None:
    each = ours(kind, 16, torch.float32)
    assert each(torch.empty(0, 16))[0].shape == (0, 16)
    assert each(torch.empty(0, 16), torch.empty(0, 16))[0].shape == (0, 16)


def test_rows_of_another_width_or_dtype_are_refused() -> None:
    each = ours("rms", 16, torch.float32)
    for x, residual in (
        (torch.zeros(2, 8), None),
        (torch.zeros(2, 16).bfloat16(), None),
        (torch.zeros(2, 16), torch.zeros(3, 16)),
        (torch.zeros(2, 16), torch.zeros(2, 16).bfloat16()),
    ):
        with pytest.raises(AssertionError):
            each(x, residual)
