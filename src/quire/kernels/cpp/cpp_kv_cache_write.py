"""The write of new keys and values to the cache in C++, fused with rotary; csrc/kv_write.cpp explains it.

The caches are laid out as `cache_layout` says.
"""

import torch
from torch import Tensor

from quire.kernels.cpp import _kernels
from quire.kernels.cpp.cpp_cache_layout import CacheSizes, block_size_of, layer_cache
from quire.kernels.cpp.dtypes import address, kernel_dtype, pair
from quire.kernels.kv_cache_write import RotarySpec
from quire.kernels.support import MAX_HEAD_DIM

_KERNELS = pair("kv_write")


def write_kv(
    spec: RotarySpec, query: Tensor, key: Tensor, value: Tensor, positions: Tensor, key_cache: Tensor,
    value_cache: Tensor, slot_mapping: Tensor,
) -> Tensor:  # fmt: skip
    """Do what `kv_cache_write.write_kv` does; query, key and value may be slices of a wider projection.

    The query is rotated in place if a token's heads are contiguous; do not use the argument afterwards.
    """
    dtype, (_, num_kv_heads, head_dim) = kernel_dtype(key.dtype), spec.heads
    turned = query if spec.cos_sin is None else _in_rows(query, dtype)
    key, value = _in_rows(key, dtype), _in_rows(value, dtype)
    num_tokens, block_size = len(key), block_size_of(key_cache)
    sizes = CacheSizes(num_kv_heads, block_size, head_dim)
    cache = layer_cache(key_cache, value_cache, sizes, dtype, spec.kv_scales)
    assert query.shape[1:] == spec.heads[::2], f"queries {tuple(query.shape)} for {spec.heads}"
    assert key.shape == value.shape == (num_tokens, num_kv_heads, head_dim), f"keys {tuple(key.shape)}"
    assert len(positions) == len(slot_mapping) == num_tokens
    assert positions.dtype == slot_mapping.dtype == torch.int64
    assert positions.is_contiguous()
    assert slot_mapping.is_contiguous()
    _KERNELS[dtype](
        rotary_parameters(spec), turned.data_ptr(), turned.stride(0), key.data_ptr(), value.data_ptr(), key.stride(0),
        value.stride(0), positions.data_ptr(), slot_mapping.data_ptr(), cache, num_tokens, block_size,
    )  # fmt: skip
    return turned if turned.dtype == query.dtype else turned.to(query.dtype)


def rotary_parameters(spec: RotarySpec) -> _kernels.RotaryParameters:
    """Return a layer's rotation as kernels take it."""
    assert spec.heads.head_dim <= MAX_HEAD_DIM, f"head size {spec.heads.head_dim}"
    heads = _kernels.Heads(*spec.heads)
    return _kernels.RotaryParameters(heads, address(spec.cos_sin), spec.rotary_dim, spec.is_interleaved)


def _in_rows(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [num_tokens, num_heads, head_dim] in `dtype` with a token's heads end to end."""
    _, head_stride, stride = heads.stride()
    in_rows = heads if stride == 1 and head_stride == heads.shape[2] else heads.contiguous()
    return in_rows if in_rows.dtype == dtype else in_rows.to(dtype)
