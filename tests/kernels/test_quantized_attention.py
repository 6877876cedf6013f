"""Attention over 8-bit keys and values in PyTorch: against plain attention over what they stand for, and to the bit."""

import pytest
import torch
from torch import Tensor

from quire.core.config import KERNEL_BLOCK_SIZES, LATENT_SCALE_DIMS, QUANTIZED
from quire.kernels.back_end import BackEnd
from quire.kernels.kv_cache import KVScales
from quire.kernels.reference.back_ends import REFERENCE, TORCH
from quire.kernels.reference.kv_cache import decode, encode
from support.paged_cache import Paging, Part, Tokens, attend, random_latents

HEADS = [(4, 2, 32), (14, 2, 64), (8, 1, 80)]
LENGTH = 300  # several key tiles, the last one not full
KV = list(QUANTIZED)
OF_THE_LAYER = KVScales(0.75, 0.75)  # with fp8; latents' values are parts of keys


def stood_for(x: Tensor, kv: str) -> Tensor:
    """Return keys or values [length, num_kv_heads, head_dim] as a cache gives them back, float32."""
    dtype, width = getattr(torch, QUANTIZED[kv].element), x.shape[2] + QUANTIZED[kv].scale_bytes
    elements, scales = decode(encode(x, dtype, width), dtype, x.shape[2])
    return elements * (scales[..., None] if isinstance(scales, Tensor) else scales)


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("window", [None, 50])
def test_reference_is_plain_attention_over_what_is_stored(kv: str, window: int | None) -> None:
    tokens = Tokens.random(200, (4, 2, 32))
    plain = Tokens(tokens.query, stood_for(tokens.key, kv), stood_for(tokens.value, kv))
    (result,) = attend([Part(tokens, 150, 200)], window=window, back_end=REFERENCE, kv=kv)
    (expected,) = attend([Part(plain, 150, 200)], window=window, back_end=REFERENCE)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(result, attend([Part(tokens, 150, 200)], window=window, back_end=REFERENCE)[0])


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("kv", KV)
def test_back_end_matches_reference(
    kv: str, window: int | None, heads: tuple[int, int, int], dtype: torch.dtype, tol: float
) -> None:
    spans = [(16, 17), (0, 3), (0, 150), (249, 250)]
    parts = [Part(Tokens.random(stop, heads, dtype, seed), start, stop) for seed, (start, stop) in enumerate(spans)]
    expected = attend(parts, window=window, back_end=REFERENCE, kv=kv)
    for result, wanted in zip(attend(parts, window=window, kv=kv), expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=tol, atol=tol)


def test_scales_of_a_layer_are_those_of_its_keys_and_values() -> None:
    part = Part(Tokens.random(150, (4, 2, 32)), 100, 150)
    (expected,) = attend([part], kv="fp8")
    (doubled,) = attend([part], kv="fp8", scales=KVScales(2.0, 0.5))
    torch.testing.assert_close(doubled, expected, rtol=1e-3, atol=1e-3)
    (other,) = attend([part], kv="fp8", scales=KVScales(0.3, 0.7))
    for back_end in (TORCH, REFERENCE):
        (again,) = attend([part], back_end=back_end, kv="fp8", scales=KVScales(0.3, 0.7))
        torch.testing.assert_close(again, other, rtol=1e-5, atol=1e-5)
    assert (other - expected).abs().max() < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("kv", KV)
def test_chunking_never_changes_a_bit(dtype: torch.dtype, window: int | None, kv: str) -> None:
    tokens = Tokens.random(LENGTH, HEADS[1], dtype)
    whole = attend([Part(tokens, 0, LENGTH)], window=window, kv=kv)[0]
    for chunk, begin in ((1, 290), (7, 230), (33, 0)):
        parts = [Part(tokens, start, min(start + chunk, LENGTH)) for start in range(begin, LENGTH, chunk)]
        chunked = torch.cat([attend([part], window=window, kv=kv)[0] for part in parts])
        assert torch.equal(chunked, whole[begin:]), f"chunks of {chunk}"


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("kv", KV)
def test_neighbours_and_blocks_never_change_a_bit(window: int | None, kv: str) -> None:
    tokens = Tokens.random(LENGTH, HEADS[0])
    parts = [Part(tokens, 0, 90), Part(tokens, 90, LENGTH - 1), Part(tokens, LENGTH - 1, LENGTH)]
    alone = [attend([part], window=window, kv=kv)[0] for part in parts]
    for seed, block_size in enumerate(KERNEL_BLOCK_SIZES):
        beside = Part(Tokens.random(50 + seed, HEADS[0], seed=seed), 10, 50 + seed)
        results = attend([beside, *parts], Paging(block_size, seed), window, kv=kv)[1:]
        assert all(map(torch.equal, results, alone)), f"blocks of {block_size}"


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_token_that_is_not_finite_spoils_what_sees_it_and_no_other_sequence(kv: str, bad: float) -> None:
    tokens, beside = Tokens.random(100, (4, 2, 32)), Part(Tokens.random(80, (4, 2, 32), seed=1), 0, 80)
    alone = attend([beside], kv=kv)[0]
    tokens.key[60, 1, 3] = bad
    result, other = attend([Part(tokens, 60, 100), beside], kv=kv)
    assert result[:, 2:].isnan().all()
    assert result[:, :2].isfinite().all()
    assert torch.equal(other, alone)


def latents_stood_for(x: Tensor, kv: str) -> Tensor:
    """Return keys [length, 1, 576] as a cache gives them back, float64: groups of a latent of 512 by themselves."""
    if kv == "fp8":
        return (x / OF_THE_LAYER.key).to(torch.float8_e4m3fn).double() * OF_THE_LAYER.key
    groups = (stood_for(group, kv) for group in x[..., :512].split(LATENT_SCALE_DIMS, dim=-1))
    return torch.cat([*groups, x[..., 512:].bfloat16()], dim=-1).double()


@pytest.mark.parametrize("back_end", [REFERENCE, TORCH], ids=lambda each: each.name)
@pytest.mark.parametrize("kv", KV)
def test_latents_are_attended_as_what_is_stored_in_float64(kv: str, back_end: BackEnd) -> None:
    tokens = random_latents(100, (5, 1, 576), torch.float32)
    latents = latents_stood_for(tokens.key, kv)[:, 0]
    (result,) = attend([Part(tokens, 60, 100)], back_end=back_end, kv=kv, value_dim=512, scales=OF_THE_LAYER)
    scores = torch.einsum("qhd,ld->hql", tokens.query[60:].double(), latents) * 576**-0.5
    hidden = torch.arange(100) > torch.arange(60, 100)[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    expected = torch.einsum("hql,ld->qhd", weights, latents[:, :512])
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv", KV)
def test_chunks_of_latents_have_the_bits_of_the_whole(kv: str) -> None:
    tokens = random_latents(150, (5, 1, 200), torch.bfloat16)
    whole = attend([Part(tokens, 0, 150)], kv=kv, value_dim=136)[0]
    for seed, (start, stop) in enumerate([(0, 7), (7, 64), (63, 130), (149, 150)]):
        (found,) = attend([Part(tokens, start, stop)], Paging(8 << seed, seed), kv=kv, value_dim=136)
        assert torch.equal(found, whole[start:stop])
