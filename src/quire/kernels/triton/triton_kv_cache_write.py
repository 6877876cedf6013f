"""Write of new keys and values to the paged cache in Triton, fused with rotary.

One program takes one token: it turns its query heads and key heads in registers and writes keys and values to the
token's slot, so that each is read and written once. Per token, 2 * (num_heads + 2 * num_kv_heads) * head_dim elements
move. A multiple of 128 heads times dimensions fills the lanes of four warps. In a cache of 8 bits (`quantized_cache`)
keys are rounded once more, as they leave the registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.paged_attention import RotarySpec
from quire.kernels.reference.kv_cache import as_bytes
from quire.kernels.triton import card
from quire.kernels.triton.card import wait_for_inputs
from quire.kernels.triton.quantized_cache import (
    encode,
    float_scales,
    form_of,
    magnitude,
    places_of,
    scales_of,
)


def write_kv(
    spec: RotarySpec, query: Tensor, key: Tensor, value: Tensor, positions: Tensor, key_cache: Tensor,
    value_cache: Tensor, slot_mapping: Tensor,
) -> Tensor:  # fmt: skip
    """Do what `kv_cache_write.write_kv` does; query, key and value may be slices of a wider projection.

    The query is rotated in place: do not use the argument afterwards.
    """
    num_tokens, (num_heads, num_kv_heads, head_dim) = len(key), spec.heads
    assert query.shape[1:] == (num_heads, head_dim), f"queries {tuple(query.shape)} for {spec.heads}"
    assert key.shape == value.shape == (num_tokens, num_kv_heads, head_dim), f"keys {tuple(key.shape)}"
    form = form_of(key_cache, head_dim)
    width = head_dim + 4 * form["HAS_SCALES"]
    assert key_cache.shape == value_cache.shape == (*key_cache.shape[:2], num_kv_heads, width)
    assert key_cache.dtype == value_cache.dtype, f"keys {key_cache.dtype}, values {value_cache.dtype}"
    assert key_cache.is_contiguous() and value_cache.is_contiguous(), "caches with gaps"
    assert key.dtype == value.dtype, f"keys {key.dtype}, values {value.dtype}"
    assert form["KV"] or key.dtype == key_cache.dtype, f"keys {key.dtype}, caches {key_cache.dtype}"
    assert all(x.stride(2) == 1 and x.stride(1) == head_dim for x in (query, key, value)), "a token's heads apart"
    assert positions.dtype == slot_mapping.dtype == torch.int64
    assert len(positions) == len(slot_mapping) == num_tokens
    half = spec.rotary_dim // 2
    arguments = (
        query, key, value, positions, spec.cos_sin, as_bytes(key_cache), as_bytes(value_cache), slot_mapping,
        query.stride(0), key.stride(0), value.stride(0),
    )  # fmt: skip
    sizes = {
        "NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim, "HALF": half,
        "IS_INTERLEAVED": spec.is_interleaved, "QUERY_HEADS": triton.next_power_of_2(num_heads),
        "KEY_HEADS": triton.next_power_of_2(num_kv_heads), "PAIRS": triton.next_power_of_2(max(1, half)),
        "DIMS": triton.next_power_of_2(head_dim), "num_warps": 4,
    }  # fmt: skip
    if not form["KV"]:
        _write_kernel[(num_tokens,)](*arguments, **sizes, **card.launch_options(query.device))
        return query
    inverses = [float(torch.tensor(1.0) / torch.tensor(scale)) for scale in spec.kv_scales]
    _write_quantized_kernel[(num_tokens,)](
        *arguments, float_scales(key_cache, form), float_scales(value_cache, form), *inverses,
        BLOCK_SIZE=key_cache.shape[1], **form, **sizes, enable_fp_fusion=False,
    )  # fmt: skip
    return query


@triton.jit
def _write_kernel(
    query, key, value, positions, cos_sin, key_cache, value_cache, slot_mapping,
    query_stride, key_stride, value_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, PAIRS: tl.constexpr,
    DIMS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One token. HALF is 0 where nothing is turned; dimensions past 2 * HALF pass through."""
    wait_for_inputs(OVERLAPS)
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
        cos, sin = _angles(cos_sin, tl.load(positions + token), pairs, HALF)
        first = heads[:, None] * HEAD_DIM + first_dims[None, :]
        is_pair = (heads < NUM_KV_HEADS)[:, None] & (pairs < HALF)[None, :]
        _turn(
            key + token * key_stride + first, key_cache + row + first, cos, sin, is_pair, is_pair & (slot >= 0), APART
        )
        _turn_query(
            query + token * query_stride, first_dims, pairs, cos, sin, NUM_HEADS, HEAD_DIM, HALF, QUERY_HEADS, APART
        )


@triton.jit
def _write_quantized_kernel(
    query, key, value, positions, cos_sin, key_cache, value_cache, slot_mapping,
    query_stride, key_stride, value_stride, key_scales, value_scales, key_inverse, value_inverse,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, PAIRS: tl.constexpr,
    DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """One token, to elements of 8 bits: products and sums are rounded one by one, so that the bits are the CPU's."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    heads, dims = tl.arange(0, KEY_HEADS), tl.arange(0, DIMS)
    is_head = (heads < NUM_KV_HEADS) & (slot >= 0)
    row, scale_places = places_of(
        slot // BLOCK_SIZE, slot % BLOCK_SIZE * NUM_KV_HEADS, BLOCK_SIZE * NUM_KV_HEADS, HEAD_DIM, HAS_SCALES
    )
    scale_places += heads
    place = heads[:, None] * HEAD_DIM + dims[None, :]
    is_element = (heads < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    is_written = is_head[:, None]
    values = tl.load(value + token * value_stride + place, mask=is_element, other=0.0).to(tl.float32)
    factors = value_inverse
    if HAS_SCALES:
        factors, stored = scales_of(magnitude(values, is_element), KV)
        tl.store(value_scales + scale_places, stored, mask=is_head)
    tl.store(value_cache + row + place, encode(values, factors, KV, HAS_SCALES), mask=is_element & is_written)
    is_kept = is_element & (dims >= 2 * HALF)[None, :]
    keys = tl.load(key + token * key_stride + place, mask=is_kept, other=0.0).to(tl.float32)
    if HAS_SCALES:
        magnitudes = magnitude(keys, is_kept)
    if HALF > 0:
        pairs = tl.arange(0, PAIRS)
        if IS_INTERLEAVED:
            first_dims, APART = 2 * pairs, 1
        else:
            first_dims, APART = pairs, HALF
        cos, sin = _angles(cos_sin, tl.load(positions + token), pairs, HALF)
        first = heads[:, None] * HEAD_DIM + first_dims[None, :]
        is_pair = (heads < NUM_KV_HEADS)[:, None] & (pairs < HALF)[None, :]
        left, right = _turned(key + token * key_stride + first, cos, sin, is_pair, APART)
        left = left.to(key.dtype.element_ty).to(tl.float32)  # a key has the model's dtype before it is stored
        right = right.to(key.dtype.element_ty).to(tl.float32)
        if HAS_SCALES:
            magnitudes = tl.maximum(magnitudes, tl.maximum(magnitude(left, is_pair), magnitude(right, is_pair)))
    factors = key_inverse
    if HAS_SCALES:
        factors, stored = scales_of(magnitudes, KV)
        tl.store(key_scales + scale_places, stored, mask=is_head)
    tl.store(key_cache + row + place, encode(keys, factors, KV, HAS_SCALES), mask=is_kept & is_written)
    if HALF > 0:
        target = key_cache + row + first
        tl.store(target, encode(left, factors, KV, HAS_SCALES), mask=is_pair & is_written)
        tl.store(target + APART, encode(right, factors, KV, HAS_SCALES), mask=is_pair & is_written)
        _turn_query(
            query + token * query_stride, first_dims, pairs, cos, sin, NUM_HEADS, HEAD_DIM, HALF, QUERY_HEADS, APART
        )


@triton.jit
def _angles(cos_sin, position, pairs, HALF: tl.constexpr):
    """Return the cosines and the sines of a position's pairs, [1, PAIRS]; zeros past HALF."""
    places, is_pair = cos_sin + position * (2 * HALF) + pairs, pairs < HALF
    return tl.load(places, mask=is_pair, other=0.0)[None, :], tl.load(places + HALF, mask=is_pair, other=0.0)[None, :]


@triton.jit
def _turn_query(
    query, first_dims, pairs, cos, sin, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    QUERY_HEADS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Turn the query heads of a token in place."""
    heads = tl.arange(0, QUERY_HEADS)
    first = query + heads[:, None] * HEAD_DIM + first_dims[None, :]
    is_pair = (heads < NUM_HEADS)[:, None] & (pairs < HALF)[None, :]
    _turn(first, first, cos, sin, is_pair, is_pair, APART)


@triton.jit
def _turn(source, target, cos, sin, is_pair, is_written, APART: tl.constexpr):
    """Turn pairs of dimensions APART from each other, in float32, rounded once."""
    first, second = _turned(source, cos, sin, is_pair, APART)
    tl.store(target, first, mask=is_written)
    tl.store(target + APART, second, mask=is_written)


@triton.jit
def _turned(source, cos, sin, is_pair, APART: tl.constexpr):
    """Return pairs of dimensions APART from each other, turned, in float32."""
    first = tl.load(source, mask=is_pair).to(tl.float32)
    second = tl.load(source + APART, mask=is_pair).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin
