"""Latents in 8 bits, in C++: stored bytes to the bit, attention over what they stand for, and exact to itself."""

import pytest
import torch

from quire.core.config import KERNEL_BLOCK_SIZES, QUANTIZED
from quire.kernels.kv_cache import KVScales
from quire.kernels.reference import kv_cache
from quire.kernels.reference.back_ends import REFERENCE
from support.cpp_kernels import cache_shapes, write_kv
from support.packed_cache import CPP, pack
from support.paged_cache import Paging, Part, attend, random_latents, rotary_spec
from support.pairwise import covering
from support.rotary import frequencies, table_of
from support.threads import set_num_threads

KV = list(QUANTIZED)
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
LATENTS = [((16, 1, 576), 512), ((130, 1, 48), 40), ((5, 1, 200), 136)]  # heads, dimensions of keys that are values
NUM_BLOCKS = 12
OF_THE_LAYER = KVScales(0.7, 0.7)  # with fp8; a value is a part of its key
BAD = [torch.nan, torch.inf, -torch.inf, 0.0, 1e-38, 3e38, -1e9, 500.0]


@covering(
    {
        ("block_size", "head_dim", "latent_dim"): [(8, 576, 512), (16, 576, 512), (16, 208, 136), (64, 40, 32)],
        "kv": KV, "dtype": [torch.float32, torch.bfloat16], "num_threads": [1, 2],
    },
    indirect=["num_threads"],
)  # fmt: skip
def test_stored_bytes_are_the_reference_s(
    block_size: int, head_dim: int, latent_dim: int, kv: str, dtype: torch.dtype, num_threads: int
) -> None:
    generator, stored = torch.Generator().manual_seed(0), QUANTIZED[kv]
    heads = torch.randn(60, 5, head_dim, generator=generator) * 10.0 ** (torch.arange(head_dim) // 60 - 4)
    for i, bad in enumerate(BAD):
        heads[i, 4, (37 * i) % head_dim] = bad
    heads[-1, 4], heads[-2, 4] = 0, 0.5 * torch.arange(head_dim) - 3
    query, key = heads.to(dtype).split([4, 1], dim=1)
    slots = torch.randperm(NUM_BLOCKS * block_size, generator=generator)[:60]
    slots = torch.where(torch.rand(60, generator=generator) < 0.2, -1, slots)
    element, extra_bytes = getattr(torch, stored.element), stored.extra_bytes(head_dim, latent_dim)
    plain = torch.full((NUM_BLOCKS, block_size, 1, head_dim + extra_bytes), 7, dtype=torch.int8).view(element)
    shape, _ = cache_shapes(NUM_BLOCKS, block_size, 1, head_dim, element, extra_bytes)
    ours = torch.full(shape, 7, dtype=torch.int8).view(element)
    empty = ours.new_empty(NUM_BLOCKS, 0)
    spec = rotary_spec(
        query, key, table_of(frequencies(8), 64), is_interleaved=True, rotary_start=latent_dim, kv_scales=OF_THE_LAYER
    )
    positions = torch.arange(60)
    turned = write_kv(spec, query.clone(), key, None, positions, ours, empty, slots)
    expected = kv_cache.write_kv(spec, query, key, None, positions, plain, empty, slots)
    assert torch.equal(turned, expected)
    packed, _ = pack(plain, plain, head_dim, latent_dim)
    assert torch.equal(ours.view(torch.int8), packed.view(torch.int8))


@covering(
    {
        "kv": KV, ("heads", "value_dim"): LATENTS, "window": [None, 50], "block_size": [8, 16, 64],
        ("dtype", "tol"): DTYPES,
    }
)  # fmt: skip
def test_kernel_matches_reference(
    kv: str, heads: tuple[int, int, int], value_dim: int, window: int | None, block_size: int, dtype: torch.dtype,
    tol: float,
) -> None:  # fmt: skip
    spans = [(0, 1), (16, 17), (0, 40), (255, 256), (256, 257), (230, 270)]
    parts = [Part(random_latents(stop, heads, dtype, seed), start, stop) for seed, (start, stop) in enumerate(spans)]
    more = {"kv": kv, "value_dim": value_dim, "scales": OF_THE_LAYER}
    expected = attend(parts, Paging(block_size), window, REFERENCE, **more)
    for result, wanted in zip(attend(parts, Paging(block_size), window, CPP, **more), expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=tol, atol=tol)


@covering(
    {
        "kv": ["int8_per_token_head", "fp8"], ("heads", "value_dim"): LATENTS[:2], "window": [None, 70],
        "dtype": [torch.float32, torch.bfloat16], "num_threads": [1, 2],
    },
    indirect=["num_threads"],
)  # fmt: skip
def test_chunks_neighbours_threads_and_blocks_never_change_a_bit(
    kv: str, heads: tuple[int, int, int], value_dim: int, window: int | None, dtype: torch.dtype, num_threads: int
) -> None:
    tokens, other = random_latents(290, heads, dtype), random_latents(40, heads, dtype, seed=1)
    more = {"kv": kv, "value_dim": value_dim}
    whole = attend([Part(tokens, 0, 290)], None, window, CPP, **more)[0]
    for seed, chunk in enumerate([(0, 7), (7, 31), (250, 256), (256, 289), (289, 290)]):
        paging = Paging(KERNEL_BLOCK_SIZES[seed % len(KERNEL_BLOCK_SIZES)], seed)
        beside = attend([Part(other, 3, 40), Part(tokens, *chunk)], paging, window, CPP, **more)[1]
        assert torch.equal(beside, whole[slice(*chunk)]), f"chunk {chunk}"
    set_num_threads(1)
    assert torch.equal(attend([Part(tokens, 289, 290)], None, window, CPP, **more)[0], whole[289:])


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_token_that_is_not_finite_spoils_what_sees_it_and_no_other_sequence(kv: str, dtype: torch.dtype) -> None:
    heads, more = (4, 1, 200), {"kv": kv, "value_dim": 136}
    tokens, beside = random_latents(100, heads, dtype), Part(random_latents(80, heads, dtype, 1), 0, 80)
    alone = attend([beside], back_end=CPP, **more)[0]
    tokens.key[60, 0, 150] = torch.nan
    result, other = attend([Part(tokens, 50, 100), beside], back_end=CPP, **more)
    assert result[10:].isnan().all()
    assert result[:10].isfinite().all()
    assert torch.equal(other, alone)
