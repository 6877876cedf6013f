"""The cache of 8 bits in C++: stored bytes to the bit, attention to the reference's tolerance, and exact to itself."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from quire.core.config import KERNEL_BLOCK_SIZES, QUANTIZED
from quire.kernels.back_end import BackEnd
from quire.kernels.kv_cache import KVScales
from quire.kernels.reference import kv_cache
from quire.kernels.reference.back_ends import REFERENCE
from quire.kernels.reference.kv_cache import apply_rotary
from quire.kernels.reference.paged_attention import reference
from support.cpp_kernels import cache_shapes, write_kv
from support.packed_cache import CPP, pack
from support.paged_cache import Paging, Part, Tokens, attend, rotary_spec
from support.pairwise import covering
from support.rotary import frequencies, table_of
from support.threads import set_num_threads

KV = list(QUANTIZED)
SCALED_AND_NOT = ["int8_per_token_head", "fp8"]  # each part of the code at least once
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
HEADS = [(4, 2, 24), (14, 2, 64), (8, 1, 80)]
LENGTH = 600  # more than two partitions of 256 tokens
NUM_BLOCKS = 12
INTEGER_ISAS = ("avx512_bf16", "avx512_vnni")  # int8 of models in bfloat16 is multiplied in integers
BAD = [torch.nan, torch.inf, -torch.inf, 0.0, 1e-38, 3e38, -1e9, 500.0]


def reference_of(isa: str, kv: str, dtype: torch.dtype) -> BackEnd:
    """Return the reference with the arithmetic of an instruction set."""
    in_integers = isa in INTEGER_ISAS and kv == "int8_per_token_head" and dtype == torch.bfloat16
    return replace(REFERENCE, paged_attention=partial(reference, in_integers=in_integers))


def hostile_heads(num_tokens: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Query, key and value, 12 heads in all; in some NaN, infinity, very large or small numbers, zeros, ties."""
    generator = torch.Generator().manual_seed(num_tokens)
    heads = torch.randn(num_tokens, 12, head_dim, generator=generator) * 10.0 ** torch.arange(-6, 6)[:, None]
    for i, bad in enumerate(BAD):
        heads[i * num_tokens // len(BAD), 6 + i % 6, (5 * i) % head_dim] = bad
    heads[-1, 7:10] = 0
    heads[-2, 8:11] = 0.5 * torch.arange(head_dim) - 3  # ties
    return heads.to(dtype)


@covering(
    {
        ("block_size", "head_dim"): [(8, 24), (16, 64), (128, 8), (16, 512)],
        "dtype": [torch.float32, torch.bfloat16, torch.float16],
        "kv": KV,
    },
)
def test_stored_bytes_are_the_reference_s(block_size: int, head_dim: int, dtype: torch.dtype, kv: str) -> None:
    stored, heads = QUANTIZED[kv], hostile_heads(60, head_dim, dtype)
    query, key, value = heads[:, :6], heads[:, 6:9], heads[:, 9:]
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(NUM_BLOCKS * block_size, generator=generator)[:60]
    slots = torch.where(torch.rand(60, generator=generator) < 0.2, -1, slots)
    element, width = getattr(torch, stored.element), head_dim + stored.scale_bytes
    plain = [torch.full((NUM_BLOCKS, block_size, 3, width), 7, dtype=torch.int8).view(element) for _ in range(2)]
    shapes = cache_shapes(NUM_BLOCKS, block_size, 3, head_dim, element, stored.scale_bytes)
    ours = [torch.full(shape, 7, dtype=torch.int8).view(element) for shape in shapes]
    spec = rotary_spec(query, key)
    write_kv(spec, query, key, value, slots, *ours, slots)
    kv_cache.write_kv(spec, query, key, value, slots, *plain, slots)
    for cache, expected in zip(ours, pack(*plain, head_dim), strict=True):
        assert torch.equal(cache.view(torch.int8), expected.view(torch.int8))


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotated_keys_are_quantized_as_they_would_be_stored(kv: str, dtype: torch.dtype) -> None:
    stored, heads = QUANTIZED[kv], torch.randn(50, 12, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    query, key, value = heads[:, :6], heads[:, 6:9], heads[:, 9:]
    table = table_of(frequencies(64), 300)
    positions, slots = torch.randperm(300)[:50], torch.randperm(NUM_BLOCKS * 16)[:50]
    element, width = getattr(torch, stored.element), 64 + stored.scale_bytes
    ours, plain = (
        [torch.zeros(shape, dtype=torch.int8).view(element) for _ in range(2)]
        for shape in (cache_shapes(NUM_BLOCKS, 16, 3, 64, element, stored.scale_bytes)[0], (NUM_BLOCKS, 16, 3, width))
    )
    turned, turned_key = apply_rotary(query, key, positions, table)
    spec = rotary_spec(query, key, table)
    assert torch.equal(write_kv(spec, query, key.clone(), value.clone(), positions, *ours, slots), turned)
    kv_cache.write_kv(rotary_spec(query, key), turned, turned_key, value, positions, *plain, slots)
    for cache, expected in zip(ours, pack(*plain, 64), strict=True):
        assert torch.equal(cache.view(torch.int8), expected.view(torch.int8))


@covering({"kv": KV, "window": [None, 50], "heads": HEADS, ("dtype", "tol"): DTYPES})
def test_kernel_matches_reference(
    isa: str, kv: str, window: int | None, heads: tuple[int, int, int], dtype: torch.dtype, tol: float
) -> None:
    spans = [(0, 1), (16, 17), (0, 40), (255, 256), (256, 257), (230, 270)]
    parts = [Part(Tokens.random(stop, heads, dtype, seed), start, stop) for seed, (start, stop) in enumerate(spans)]
    expected = attend(parts, window=window, back_end=reference_of(isa, kv, dtype), kv=kv)
    for result, wanted in zip(attend(parts, window=window, back_end=CPP, kv=kv), expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=tol, atol=tol)


@pytest.mark.parametrize("heads", [(4, 2, 8), (14, 2, 64), (6, 1, 200)], ids=str)
@pytest.mark.parametrize("more", [{}, {"window": 300}, {"softcap": 2.0}], ids=str)
def test_integers_are_rounded_as_the_reference_rounds_them(
    isa: str, heads: tuple[int, int, int], more: dict[str, float]
) -> None:
    """Weights as a sink makes them: one is a thousand times as large as the others, and its value a tenth."""
    if isa not in INTEGER_ISAS:
        pytest.skip("multiplies floats")
    tokens = Tokens.random(LENGTH, heads, torch.bfloat16)
    tokens.key[0] = 10 * tokens.query[-1].view(heads[1], -1, heads[2]).mean(dim=1)
    tokens.value[0] /= 10
    parts = [Part(tokens, 550, LENGTH), Part(tokens, 0, 40)]
    back_ends = CPP, reference_of(isa, "int8_per_token_head", torch.bfloat16), REFERENCE
    result, rounded, unrounded = (
        torch.cat(attend(parts, back_end=each, kv="int8_per_token_head", **more)).float() for each in back_ends
    )
    torch.testing.assert_close(result, rounded, rtol=8e-3, atol=1e-2)  # where a sum is near a tie: one step of a weight
    assert (result - rounded).abs().mean() < 0.2 * (result - unrounded).abs().mean()


@pytest.mark.parametrize(("dtype", "tol"), DTYPES, ids=str)
def test_scales_of_a_layer_are_the_reference_s(dtype: torch.dtype, tol: float) -> None:
    part, scales = Part(Tokens.random(300, (4, 2, 24), dtype), 250, 300), KVScales(0.3, 0.7)
    result, wanted = (attend([part], back_end=each, kv="fp8", scales=scales)[0] for each in (CPP, REFERENCE))
    torch.testing.assert_close(result, wanted, rtol=tol, atol=tol)
    ours, plain = (
        [torch.zeros(shape, dtype=torch.int8).view(torch.float8_e4m3fn) for _ in range(2)]
        for shape in ((NUM_BLOCKS, 3, 16, 24), (NUM_BLOCKS, 16, 3, 24))
    )
    heads, slots = hostile_heads(60, 24, dtype), torch.arange(60)
    rows = heads[:, :6], heads[:, 6:9], heads[:, 9:]
    spec = rotary_spec(*rows[:2], kv_scales=scales)
    write_kv(spec, *rows, slots, *ours, slots)
    kv_cache.write_kv(spec, *rows, slots, *plain, slots)
    for cache, expected in zip(ours, pack(*plain, 24), strict=True):
        assert torch.equal(cache.view(torch.int8), expected.view(torch.int8))


@pytest.mark.parametrize("kv", SCALED_AND_NOT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", [0, 255, 2999])
def test_needle_in_a_long_context_is_found(kv: str, dtype: torch.dtype, place: int) -> None:
    """A key that a query looks for, among others of which some dimensions are ten times as large."""
    tokens = Tokens.random(3000, (4, 2, 64), dtype)
    tokens.key[..., :2] *= 10
    tokens.query[..., :2] = 0
    tokens.query[-1] = 40 * tokens.key[place].repeat_interleave(2, dim=0)
    tokens.query[-1, :, :2] = 0
    (result,) = attend([Part(tokens, 2999, 3000)], back_end=CPP, kv=kv)
    wanted = tokens.value[place].repeat_interleave(2, dim=0)
    torch.testing.assert_close(result[0], wanted, rtol=0.07, atol=0.02)  # e4m3 keeps 4 digits


@pytest.mark.parametrize(("dtype", "tol"), DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(33, 1, 8), (142, 2, 64)], ids=str)
@pytest.mark.parametrize("kv", KV)
def test_groups_wider_than_a_block_of_rows_match_the_reference(
    isa: str, kv: str, heads: tuple[int, int, int], dtype: torch.dtype, tol: float
) -> None:
    parts = [Part(Tokens.random(stop, heads, dtype, stop), start, stop) for start, stop in ((255, 256), (0, 7))]
    expected = attend(parts, back_end=reference_of(isa, kv, dtype), kv=kv)
    for result, wanted in zip(attend(parts, back_end=CPP, kv=kv), expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=tol, atol=tol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("kv", SCALED_AND_NOT)
def test_chunking_never_changes_a_bit(dtype: torch.dtype, window: int | None, kv: str) -> None:
    tokens = Tokens.random(LENGTH, (4, 2, 24), dtype)
    whole = attend([Part(tokens, 0, LENGTH)], None, window, CPP, kv=kv)[0]
    for chunk, begin in ((1, 590), (33, 500), (200, 0)):
        parts = [Part(tokens, start, min(start + chunk, LENGTH)) for start in range(begin, LENGTH, chunk)]
        chunked = torch.cat([attend([part], None, window, CPP, kv=kv)[0] for part in parts])
        assert torch.equal(chunked, whole[begin:]), f"chunks of {chunk}"


@covering(
    {
        "kv": SCALED_AND_NOT,
        "window": [None, 70],
        "dtype": [torch.float32, torch.bfloat16],
        "num_threads": [2],
    },
    indirect=["num_threads"],
)
def test_neighbours_threads_and_blocks_never_change_a_bit(
    dtype: torch.dtype, window: int | None, kv: str, num_threads: int
) -> None:
    tokens = Tokens.random(LENGTH, (4, 2, 64), dtype)
    parts = [Part(tokens, 0, 90), Part(tokens, 90, LENGTH - 1), Part(tokens, LENGTH - 1, LENGTH)]
    set_num_threads(1)
    alone = [attend([part], window=window, back_end=CPP, kv=kv)[0] for part in parts]
    set_num_threads(num_threads)
    for seed, block_size in enumerate(KERNEL_BLOCK_SIZES):
        beside = Part(Tokens.random(300 + seed, (4, 2, 64), dtype, seed), 250, 300 + seed)
        results = attend([beside, *parts], Paging(block_size, seed), window, CPP, kv=kv)[1:]
        assert all(map(torch.equal, results, alone)), f"blocks of {block_size}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_token_that_is_not_finite_spoils_what_sees_it_and_no_other_sequence(
    kv: str, bad: float, dtype: torch.dtype
) -> None:
    tokens, beside = Tokens.random(100, (4, 2, 32), dtype), Part(Tokens.random(80, (4, 2, 32), dtype, 1), 0, 80)
    alone = attend([beside], back_end=CPP, kv=kv)[0]
    tokens.value[60, 1, 3] = bad
    result, other = attend([Part(tokens, 60, 100), beside], back_end=CPP, kv=kv)
    assert result[:, 2:].isnan().any(dim=-1).all()
    assert result[:, :2].isfinite().all()
    assert torch.equal(other, alone)
