"""RMSNorm and LayerNorm against float64, and each row to the bit against itself among other rows."""

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from quire.kernels.layers import Norm
from quire.kernels.reference.norm import TorchNorm

WIDTHS = [8, 32, 64, 80, 128, 172, 333, 768, 896, 2048, 4864]
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]


def norms(width: int, dtype: torch.dtype) -> list[Norm]:
    """RMSNorm, LayerNorm, LayerNorm without bias."""
    generator = torch.Generator().manual_seed(width)
    weight, bias = (torch.randn(width, generator=generator).to(dtype) for _ in range(2))
    return [
        TorchNorm(weight, None, 1e-6, centers=False),
        TorchNorm(weight, bias, 1e-5, centers=True),
        TorchNorm(weight, None, 1e-5, centers=True),
    ]


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3 + 0.5).to(dtype)


@pytest.mark.parametrize(("dtype", "tol"), DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_match_their_formulas_in_float64(width: int, dtype: torch.dtype, tol: float) -> None:
    x, weight, bias = rows(5, width, dtype=dtype), rows(width, dtype=dtype, seed=1), rows(width, dtype=dtype, seed=2)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    found = TorchNorm(weight, None, 1e-6, centers=False)(x)[0]
    torch.testing.assert_close(found, expected.to(dtype), rtol=tol, atol=tol)
    centred = wide - wide.mean(-1, keepdim=True)
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double() + bias.double()
    found = TorchNorm(weight, bias, 1e-5, centers=True)(x)[0]
    torch.testing.assert_close(found, expected.to(dtype), rtol=tol, atol=4 * tol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("centers", [False, True])
def test_heads_with_weights_of_their_own_equal_each_by_itself(centers: bool, dtype: torch.dtype) -> None:
    heads, weight = rows(7, 3, 24, dtype=dtype), rows(3, 24, dtype=dtype, seed=1)
    found = TorchNorm(weight, None, 1e-5, centers)(heads)[0]
    for head in range(3):
        alone = TorchNorm(weight[head], None, 1e-5, centers)(heads[:, head])[0]
        torch.testing.assert_close(found[:, head], alone, rtol=1e-6, atol=1e-6 if dtype == torch.float32 else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rms_norm_rounds_where_transformers_does(dtype: torch.dtype) -> None:
    x, weight = rows(9, 896, dtype=dtype), rows(896, dtype=dtype, seed=1)
    theirs = LlamaRMSNorm(896, eps=1e-6).to(dtype)
    theirs.weight.data.copy_(weight)
    assert torch.equal(TorchNorm(weight, None, 1e-6, centers=False)(x)[0], theirs(x))


@pytest.mark.parametrize("num_threads", [1, 2], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_have_the_same_bits_among_any_others(width: int, dtype: torch.dtype, num_threads: int) -> None:
    x = rows(300, width, dtype=dtype)
    for norm in norms(width, dtype):
        alone = torch.cat([norm(row[None])[0] for row in x])
        for begin, end in ((0, 300), (0, 2), (17, 20), (5, 69), (100, 231)):
            assert torch.equal(norm(x[begin:end])[0], alone[begin:end])
            assert torch.equal(norm(x[begin:end].clone())[0], alone[begin:end])


@pytest.mark.parametrize("head_dim", [8, 32, 64, 80, 128])
def test_heads_cut_from_a_fused_projection_have_the_same_bits(head_dim: int) -> None:
    fused = rows(40, 12 * head_dim)
    heads = fused[:, head_dim : 7 * head_dim].view(40, 6, head_dim)  # not contiguous
    for norm in norms(head_dim, torch.float32):
        expected = torch.stack([torch.stack([norm(head[None].clone())[0][0] for head in token]) for token in heads])
        assert torch.equal(norm(heads)[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_residual_is_added_first_and_returned(dtype: torch.dtype) -> None:
    x, residual = rows(6, 64, dtype=dtype), rows(6, 64, dtype=dtype, seed=1)
    for norm in norms(64, dtype):
        normed, summed = norm(x, residual)
        assert torch.equal(summed, x + residual)
        assert torch.equal(normed, norm(x + residual)[0])
        assert torch.equal(norm(x)[1], x)
