"""The write of new keys and values to the cache in C++, fused with rotary; csrc/kv_write.cpp tells how.

The caches are laid out as `cache_layout` says.
"""

import torch
from torch import Tensor

from quire.kernels.cpp.back_end import MAX_HEAD_DIM
from quire.kernels.cpp.cache_layout import check_caches
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
    turned = _in_rows(query, kernel_dtype(query.dtype))
    _write(turned, key, value, positions, cos_sin, key_cache, value_cache, slot_mapping)
    return turned if turned.dtype == query.dtype else turned.to(query.dtype)


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
    key, value = _in_rows(key, dtype), _in_rows(value, dtype)
    num_tokens, num_kv_heads, head_dim = key.shape
    block_size = key_cache.shape[3]
    assert key_cache.dtype == dtype, f"keys {dtype}, caches {key_cache.dtype}"
    assert head_dim <= MAX_HEAD_DIM, f"head size {head_dim}"
    check_caches(key_cache, value_cache, num_kv_heads, block_size, head_dim)
    assert value.shape == key.shape
    assert len(positions) == len(slot_mapping) == num_tokens
    for each in (positions, slot_mapping):
        assert each.dtype == torch.int64
        assert each.is_contiguous()
    rotary_dim = 0
    if cos_sin is not None:
        rotary_dim = cos_sin.shape[1]
        assert rotary_dim <= head_dim
        assert cos_sin.dtype == torch.float32
        assert cos_sin.is_contiguous()
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
        rotary_dim,
    )


def _in_rows(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [num_tokens, num_heads, head_dim] in `dtype` with a token's heads end to end."""
    _, head_stride, stride = heads.stride()
    in_rows = heads if stride == 1 and head_stride == heads.shape[2] else heads.contiguous()
    return in_rows if in_rows.dtype == dtype else in_rows.to(dtype)
