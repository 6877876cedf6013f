"""The write of new keys and values to the cache in C++, fused with rotary; csrc/kv_write.cpp explains it.

The caches are laid out as `cache_layout` says.
"""

import torch
from torch import Tensor

from quire.kernels.cpp.cache_layout import CacheSizes, block_size_of, layer_cache
from quire.kernels.cpp.dtypes import address, kernel_dtype, pair
from quire.kernels.cpp.limits import MAX_HEAD_DIM
from quire.kernels.kv_quantization import ONES, KVScales

_KERNELS = pair("kv_write")


def write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    scales: KVScales = ONES,
    is_interleaved: bool = False,
) -> Tensor:
    """Do what `kv_cache_write.write_kv` does; query, key and value may be slices of a wider projection.

    The query is rotated in place if a token's heads are contiguous; do not use the argument afterwards.
    """
    dtype = kernel_dtype(key.dtype)
    turned = query if cos_sin is None else _in_rows(query, dtype)
    key, value = _in_rows(key, dtype), _in_rows(value, dtype)
    num_tokens, num_kv_heads, head_dim = key.shape
    block_size = block_size_of(key_cache)
    assert head_dim <= MAX_HEAD_DIM, f"head size {head_dim}"
    cache = layer_cache(key_cache, value_cache, CacheSizes(num_kv_heads, block_size, head_dim), dtype, scales)
    assert value.shape == key.shape
    assert len(positions) == len(slot_mapping) == num_tokens
    assert positions.dtype == slot_mapping.dtype == torch.int64
    assert positions.is_contiguous()
    assert slot_mapping.is_contiguous()
    rotary_dim = 0 if cos_sin is None else cos_sin.shape[1]
    assert rotary_dim <= head_dim
    assert cos_sin is None or (cos_sin.dtype == torch.float32 and cos_sin.is_contiguous())
    _KERNELS[dtype](
        turned.data_ptr(), turned.stride(0), key.data_ptr(), value.data_ptr(), key.stride(0), value.stride(0),
        positions.data_ptr(), slot_mapping.data_ptr(), address(cos_sin), cache, num_tokens, query.shape[1],
        num_kv_heads, head_dim, block_size, rotary_dim, is_interleaved,
    )  # fmt: skip
    return turned if turned.dtype == query.dtype else turned.to(query.dtype)


def _in_rows(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [num_tokens, num_heads, head_dim] in `dtype` with a token's heads end to end."""
    _, head_stride, stride = heads.stride()
    in_rows = heads if stride == 1 and head_stride == heads.shape[2] else heads.contiguous()
    return in_rows if in_rows.dtype == dtype else in_rows.to(dtype)
