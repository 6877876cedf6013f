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


@covering(
    {
        "is_interleaved": [False, True], "block_size": [8, 64], ("head_dim", "rotary_dim"): [(40, 8), (576, 64)],
        "dtype": DTYPES, "num_threads": [1, 2],
    },
    indirect=["num_threads"],
)  # fmt: skip
def test_latents_are_turned_from_a_dimension_on_and_stored_without_values(
    is_interleaved: bool, block_size: int, head_dim: int, rotary_dim: int, dtype: torch.dtype, num_threads: int
) -> None:
    num_tokens, start = 21, head_dim - rotary_dim
    query, key, _ = fused_heads(num_tokens, head_dim, dtype)
    key, slots, positions = key[:, :1], slots_for(num_tokens, block_size), torch.arange(7, 7 + num_tokens)
    spec = rotary_spec(
        query, key, table_of(frequencies(rotary_dim), 64), is_interleaved=is_interleaved, rotary_start=start
    )
    turned = apply_rotary(
        query[..., start:], key[..., start:], positions, spec.cos_sin, is_interleaved=is_interleaved
    )  # has the dtype of the model
    expected = [torch.cat([x[..., :start], part], dim=-1) for x, part in zip((query, key), turned, strict=True)]
    ours = torch.full(cache_shapes(NUM_BLOCKS, block_size, 1, head_dim, kernel_dtype(dtype))[0], 7.0).to(
        kernel_dtype(dtype)
    )
    plain = torch.full((NUM_BLOCKS, block_size, 1, head_dim), 7.0, dtype=dtype)
    empty = ours.new_empty(NUM_BLOCKS, 0)
    found = write_kv(spec, query.clone(), key, None, positions, ours, empty, slots)
    assert torch.equal(kv_cache.write_kv(spec, query, key, None, positions, plain, empty, slots), expected[0])
    if dtype != torch.float16:  # kernels turn it in float32, and round later
        assert torch.equal(found, expected[0])
        assert torch.equal(ours, pack(plain, plain)[0])
    written = slots >= 0
    assert torch.equal(plain.view(-1, 1, head_dim)[slots[written]], expected[1][written])
    assert (plain.view(-1, head_dim) == 7.0).all(dim=1).sum() == len(plain.view(-1, head_dim)) - written.sum()
