"""Writing keys and values into their slots in C++, alone and fused with rotary."""

import torch
from torch import Tensor

from quire.kernels.reference import kv_cache
from quire.kernels.reference.kv_cache import apply_rotary
from support.cpp_kernels import cache_shapes, kernel_dtype, write_kv
from support.packed_cache import pack, unpack
from support.paged_cache import rotary_spec
from support.pairwise import covering
from support.rotary import frequencies, table_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_BLOCKS = 12


def fused_heads(num_tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as slices of one projection, with 6, 3 and 3 heads."""
    generator = torch.Generator().manual_seed(num_tokens)
    fused = torch.randn(num_tokens, 12, head_dim, generator=generator).to(dtype)
    return fused[:, :6], fused[:, 6:9], fused[:, 9:]


def slots_for(num_tokens: int, block_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(NUM_BLOCKS * block_size, generator=generator)[:num_tokens]
    return torch.where(torch.rand(num_tokens, generator=generator) < 0.2, -1, slots)


def caches(block_size: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = cache_shapes(NUM_BLOCKS, block_size, 3, head_dim, kernel_dtype(dtype))
    return [torch.full(shape, 7.0, dtype=kernel_dtype(dtype)) for shape in shapes]


def plain_caches(block_size: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.full((NUM_BLOCKS, block_size, 3, head_dim), 7.0, dtype=dtype) for _ in range(2)]


@covering(
    {
        "num_tokens": [0, 1, 5, 60],
        "block_size": [8, 16, 128],
        "dtype": DTYPES,
        "num_threads": [1, 2],
    },
    indirect=["num_threads"],
)
def test_tokens_land_in_their_slots_and_nowhere_else(
    num_tokens: int, block_size: int, dtype: torch.dtype, num_threads: int
) -> None:
    query, key, value = fused_heads(num_tokens, 24, dtype)
    slots = slots_for(num_tokens, block_size)
    ours, plain = caches(block_size, 24, dtype), plain_caches(block_size, 24, dtype)
    spec = rotary_spec(query, key)
    assert write_kv(spec, query, key, value, slots, *ours, slots).data_ptr() == query.data_ptr()
    assert torch.equal(query, fused_heads(num_tokens, 24, dtype)[0])
    kv_cache.write_kv(spec, query, key, value, slots, *plain, slots)
    assert all(map(torch.equal, ours, pack(*plain)))


@covering(
    {
        "is_interleaved": [False, True],
        ("head_dim", "rotary_dim"): [(8, 8), (64, 64), (80, 24), (128, 128)],
        "dtype": [torch.float32, torch.bfloat16],
        "num_threads": [1, 2],
    },
    indirect=["num_threads"],
)
def test_keys_and_queries_are_turned_to_the_bit_as_the_rotary_op_turns_them(
    is_interleaved: bool, head_dim: int, rotary_dim: int, dtype: torch.dtype, num_threads: int, isa: str
) -> None:
    query, key, value = fused_heads(50, head_dim, dtype)
    positions, slots = torch.randperm(300)[:50], slots_for(50, 16)
    table = table_of(frequencies(rotary_dim), 300)
    expected_query, expected_key = apply_rotary(query, key, positions, table, is_interleaved=is_interleaved)
    ours, plain = caches(16, head_dim, dtype), plain_caches(16, head_dim, dtype)
    given = query, key.clone(), value.clone()
    spec = rotary_spec(query, key, table, is_interleaved=is_interleaved)
    turned = write_kv(spec, *given, positions, *ours, slots)
    kv_cache.write_kv(rotary_spec(query, key), expected_query, expected_key, value, positions, *plain, slots)
    assert torch.equal(turned, expected_query)
    assert all(map(torch.equal, ours, pack(*plain)))


def test_float16_is_turned_in_float32_and_kept_so_in_the_cache() -> None:
    query, key, value = fused_heads(20, 32, torch.float16)
    positions, slots = torch.arange(20), torch.arange(20)
    table = table_of(frequencies(32), 20)
    keys, values = caches(16, 32, torch.float16)
    turned = write_kv(rotary_spec(query, key, table), query, key, value, positions, keys, values, slots)
    expected_query, expected_key = apply_rotary(query.float(), key.float(), positions, table)
    assert torch.equal(turned, expected_query.half())
    assert torch.equal(unpack(keys, values)[0].flatten(0, 1)[:20], expected_key)
