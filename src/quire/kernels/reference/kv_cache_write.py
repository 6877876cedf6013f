"""Rotary embedding of a step's queries and keys, and the write of its keys and values to the paged cache.

Rotary position embedding is on half-split pairs (Su et al. 2021, in the layout of GPT-NeoX and Llama), or on
interleaved ones: dimensions (2i, 2i + 1), as in GPT-J.
"""

import torch
from torch import Tensor

from quire.kernels.kv_cache_write import RotarySpec
from quire.kernels.reference.kv_quantization import as_bytes, encode, is_quantized


def write_kv(
    spec: RotarySpec, query: Tensor, key: Tensor, value: Tensor, positions: Tensor, key_cache: Tensor,
    value_cache: Tensor, slot_mapping: Tensor,
) -> Tensor:  # fmt: skip
    """Turn query and key as `apply_rotary` does, if there is a table; store key and value; return the query.

    Token t's key and value go to slot `slot_mapping[t]`; -1 writes nothing. key and value [num_tokens, num_kv_heads,
    head_dim]; caches [num_blocks, block_size, num_kv_heads, head_dim], contiguous; slot_mapping [num_tokens] int64, no
    slot twice. A cache of 8-bit elements is [num_blocks, block_size, num_kv_heads, width], as `kv_quantization.encode`
    fills it, with the spec's scales unless it stores them. One op, so that a back end may do it in one pass; it may
    rotate the query in place. Kwon et al. 2023, section 5.1.
    """
    if spec.cos_sin is not None:
        query, key = apply_rotary(query, key, positions, spec.cos_sin, is_interleaved=spec.is_interleaved)
    written = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping.index_select(0, written)
    for new, cache, scale in zip((key, value), (key_cache, value_cache), spec.kv_scales, strict=True):
        rows = new.index_select(0, written)
        rows = encode(rows, cache.dtype, cache.shape[3], scale) if is_quantized(cache) else rows.to(cache.dtype)
        as_bytes(cache).view(-1, *rows.shape[1:]).index_copy_(0, slots, rows)
    return query


def apply_rotary(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, *, is_interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Return query and key turned by their positions, in their own dtype; computed in float32, rounded once.

    query [num_tokens, num_heads, head_dim], key [num_tokens, num_kv_heads, head_dim], positions [num_tokens] int,
    cos_sin from `rotary_table.rotary_table`. Dimensions past rotary_dim pass through.
    """
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, rotary_dim / 2]
    rotate = _rotate_interleaved if is_interleaved else _rotate
    return rotate(query, cos, sin), rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*(part.to(x.dtype) for part in turned), x[..., 2 * half :]], dim=-1)


def _rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary_dim = 2 * cos.shape[-1]
    first, second = x[..., 0:rotary_dim:2].float(), x[..., 1:rotary_dim:2].float()
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    return torch.cat([turned.to(x.dtype), x[..., rotary_dim:]], dim=-1)
