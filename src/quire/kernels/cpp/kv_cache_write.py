"""The write of new keys and values to the cache in C++, fused with rotary; csrc/kv_write.cpp tells how.

The caches are laid out as `cache_layout` says.
"""

import torch
from torch import Tensor

from quire.kernels.cpp.cache_layout import MAX_HEAD_DIM, check_caches
from quire.kernels.cpp.dtypes import address, kernel_dtype, pair

_KERNELS = pair("kv_write")


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store what `kv_cache_write.reference` stores; key and value may be slices of a wider projection."""
    _write(None, key, value, slot_mapping, None, key_cache, value_cache, slot_mapping)


def rotate_and_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Turn query and key as `rotary.apply_rotary` does, store key and value as `write_kv` does, return the query.

    The query is turned where it stands, if a token's heads stand together; do not use the argument afterwards.
    """
    dtype = kernel_dtype(query.dtype)
    turned = query.to(dtype)
    if turned.stride(2) != 1 or turned.stride(1) != turned.shape[2]:
        turned = turned.contiguous()
    _write(turned, key, value, positions, cos_sin, key_cache, value_cache, slot_mapping)
    return turned.to(query.dtype)


def _write(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    dtype = kernel_dtype(key.dtype)
    key, value = _in_rows(key.to(dtype)), _in_rows(value.to(dtype))
    num_tokens, num_kv_heads, head_dim = key.shape
    block_size = key_cache.shape[3]
    assert key_cache.dtype == dtype, f"keys {dtype}, caches {key_cache.dtype}"
    assert key_cache.shape[1] == num_kv_heads, f"{num_kv_heads} heads for caches of {key_cache.shape[1]}"
    assert head_dim <= MAX_HEAD_DIM, f"head size {head_dim}"
    check_caches(key_cache, value_cache, block_size, head_dim)
    assert value.shape == key.shape
    assert len(positions) == len(slot_mapping) == num_tokens
    assert all(x.is_contiguous() and x.dtype == torch.int64 for x in (positions, slot_mapping))
    assert cos_sin is None or (cos_sin.is_contiguous() and cos_sin.shape[1] <= head_dim)
    _KERNELS[dtype](
        address(query),
        0 if query is None else query.stride(0),
        key.data_ptr(),
        value.data_ptr(),
        key.stride(0),
        value.stride(0),
        positions.data_ptr(),
        slot_mapping.data_ptr(),
        address(cos_sin),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        num_tokens,
        0 if query is None else query.shape[1],
        num_kv_heads,
        head_dim,
        block_size,
        0 if cos_sin is None else cos_sin.shape[1],
    )


def _in_rows(heads: Tensor) -> Tensor:
    """Return [num_tokens, num_heads, head_dim] with a token's heads end to end."""
    return heads if heads.stride(2) == 1 and heads.stride(1) == heads.shape[2] else heads.contiguous()
