"""RMSNorm in C++ against the plain one, and to the bit among other rows."""

import pytest
import torch

from quire.kernels import norm
from quire.kernels.cpp.norm import rms_norm

DTYPES = [(torch.float32, 2e-6), (torch.bfloat16, 8e-3), (torch.float16, 2e-3)]


@pytest.mark.parametrize(("dtype", "tol"), DTYPES, ids=str)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 70])
@pytest.mark.parametrize("width", [1, 8, 17, 64, 896])
def test_kernel_matches_the_plain_op(
    width: int, num_rows: int, has_residual: bool, dtype: torch.dtype, tol: float
) -> None:
    generator = torch.Generator().manual_seed(width)
    x, residual = (torch.randn(num_rows, width, generator=generator).to(dtype) * 3 for _ in range(2))
    weight = torch.randn(width, generator=generator).to(dtype)
    arguments = (x, weight, 1e-6, residual if has_residual else None)
    for found, expected in zip(rms_norm(*arguments), norm.rms_norm(*arguments), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=tol, atol=tol)


@pytest.mark.parametrize("num_threads", [1, 2], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_have_the_same_bits_among_any_others(dtype: torch.dtype, num_threads: int) -> None:
    x, residual = (torch.randn(100, 897).to(dtype) for _ in range(2))
    weight = torch.randn(897).to(dtype)
    together = rms_norm(x, weight, 1e-5, residual)[0]
    alone = [rms_norm(x[i : i + 1], weight, 1e-5, residual[i : i + 1])[0] for i in range(100)]
    assert torch.equal(together, torch.cat(alone))


def test_heads_inside_a_wider_projection_are_normed_in_place_of_a_copy() -> None:
    """As query and key norms call it: [num_tokens, num_heads, head_dim], a slice of the fused projection."""
    heads = torch.randn(5, 9, 16)[:, 2:6]
    weight = torch.randn(16)
    found = rms_norm(heads, weight, 1e-6)[0]
    assert found.shape == heads.shape
    torch.testing.assert_close(found, norm.rms_norm(heads, weight, 1e-6)[0])
