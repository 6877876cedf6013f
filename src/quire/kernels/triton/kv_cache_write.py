"""Write of new keys and values to the paged cache in Triton, fused with rotary.

One program takes one token: it turns its query heads and key heads in registers and writes keys and values to the
token's slot, so that each is read and written once. Per token, 2 * (num_heads + 2 * num_kv_heads) * head_dim elements
move. A multiple of 128 heads times dimensions fills the lanes of four warps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    is_interleaved: bool = False,
) -> Tensor:
    """Do what `kv_cache_write.write_kv` does; query, key and value may be slices of a wider projection.

    The query is rotated in place: do not use the argument afterwards.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    rotary_dim = 0 if cos_sin is None else cos_sin.shape[1]
    assert value.shape == key.shape
    assert key_cache.shape == value_cache.shape == (*key_cache.shape[:2], num_kv_heads, head_dim)
    assert key_cache.is_contiguous() and value_cache.is_contiguous(), "caches with gaps"
    assert key.dtype == value.dtype == key_cache.dtype, f"keys {key.dtype}, caches {key_cache.dtype}"
    assert all(x.stride(2) == 1 and x.stride(1) == head_dim for x in (query, key, value)), "a token's heads apart"
    assert positions.dtype == slot_mapping.dtype == torch.int64
    assert len(positions) == len(slot_mapping) == num_tokens
    assert rotary_dim <= head_dim
    assert cos_sin is None or (cos_sin.dtype == torch.float32 and cos_sin.is_contiguous())
    half = rotary_dim // 2
    _write_kernel[(num_tokens,)](
        query, key, value, positions, cos_sin, key_cache, value_cache, slot_mapping,
        query.stride(0), key.stride(0), value.stride(0),
        NUM_HEADS=query.shape[1],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        IS_INTERLEAVED=is_interleaved,
        QUERY_HEADS=triton.next_power_of_2(query.shape[1]),
        KEY_HEADS=triton.next_power_of_2(num_kv_heads),
        PAIRS=triton.next_power_of_2(max(1, half)),
        DIMS=triton.next_power_of_2(head_dim),
        num_warps=4,
    )  # fmt: skip
    return query


@triton.jit
def _write_kernel(
    query, key, value, positions, cos_sin, key_cache, value_cache, slot_mapping,
    query_stride, key_stride, value_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, PAIRS: tl.constexpr,
    DIMS: tl.constexpr,
):  # fmt: skip
    """One token. HALF is 0 where nothing is turned; dimensions past 2 * HALF pass through."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    row = slot * NUM_KV_HEADS * HEAD_DIM
    heads, dims = tl.arange(0, KEY_HEADS), tl.arange(0, DIMS)
    place = heads[:, None] * HEAD_DIM + dims[None, :]
    is_element = (heads < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    values = tl.load(value + token * value_stride + place, mask=is_element)
    tl.store(value_cache + row + place, values, mask=is_element & (slot >= 0))
    is_kept = is_element & (dims >= 2 * HALF)[None, :]
    keys = tl.load(key + token * key_stride + place, mask=is_kept)
    tl.store(key_cache + row + place, keys, mask=is_kept & (slot >= 0))
    if HALF > 0:
        pairs = tl.arange(0, PAIRS)
        if IS_INTERLEAVED:
            first_dims, APART = 2 * pairs, 1
        else:
            first_dims, APART = pairs, HALF
        angles = cos_sin + tl.load(positions + token) * (2 * HALF) + pairs
        cos = tl.load(angles, mask=pairs < HALF)[None, :]
        sin = tl.load(angles + HALF, mask=pairs < HALF)[None, :]
        first = heads[:, None] * HEAD_DIM + first_dims[None, :]
        is_pair = (heads < NUM_KV_HEADS)[:, None] & (pairs < HALF)[None, :]
        _turn(
            key + token * key_stride + first, key_cache + row + first, cos, sin, is_pair, is_pair & (slot >= 0), APART
        )
        heads = tl.arange(0, QUERY_HEADS)
        first = query + token * query_stride + heads[:, None] * HEAD_DIM + first_dims[None, :]
        is_pair = (heads < NUM_HEADS)[:, None] & (pairs < HALF)[None, :]
        _turn(first, first, cos, sin, is_pair, is_pair, APART)


@triton.jit
def _turn(source, target, cos, sin, is_pair, is_written, APART: tl.constexpr):
    """Turn pairs of dimensions APART from each other, in float32, rounded once."""
    first = tl.load(source, mask=is_pair).to(tl.float32)
    second = tl.load(source + APART, mask=is_pair).to(tl.float32)
    tl.store(target, first * cos - second * sin, mask=is_written)
    tl.store(target + APART, second * cos + first * sin, mask=is_written)
