"""The write of new keys and values to the cache in C++, fused with rotary; csrc/kv_write.cpp explains it.

The caches are laid out as `cache_layout` says.
"""

import numpy as np
from numpy.typing import NDArray

from quire.core.arrays import Array, DType
from quire.kernels.conversion import converted
from quire.kernels.cpp import _kernels
from quire.kernels.cpp.cpp_cache_layout import CacheSizes, block_size_of, layer_cache
from quire.kernels.cpp.dtypes import address, in_heads, kernel_dtype, pair, row_stride
from quire.kernels.kv_cache_write import RotarySpec
from quire.kernels.support import MAX_HEAD_DIM

_KERNELS = pair("kv_write")


def write_kv(
    spec: RotarySpec, query: Array, key: Array, value: Array, positions: NDArray[np.int64], key_cache: Array,
    value_cache: Array, slot_mapping: NDArray[np.int64],
) -> Array:  # fmt: skip
    """Do what `reference.kv_cache_write.write_kv` does; query, key and value may be slices of a wider projection.

    The query is rotated in place if a token's heads are contiguous; do not use the argument afterwards.
    """
    dtype, (_, num_kv_heads, head_dim) = kernel_dtype(key.dtype), spec.heads
    turned = query if spec.cos_sin is None else _in_rows(query, dtype)
    key, value = _in_rows(key, dtype), _in_rows(value, dtype)
    num_tokens, block_size = len(key), block_size_of(key_cache)
    sizes = CacheSizes(num_kv_heads, block_size, head_dim)
    cache = layer_cache(key_cache, value_cache, sizes, dtype, spec.kv_scales)
    assert query.shape[1:] == spec.heads[::2], f"queries {query.shape} for {spec.heads}"
    assert key.shape == value.shape == (num_tokens, num_kv_heads, head_dim), f"keys {key.shape}"
    assert len(positions) == len(slot_mapping) == num_tokens
    assert positions.dtype == slot_mapping.dtype == np.int64
    assert positions.flags.c_contiguous
    assert slot_mapping.flags.c_contiguous
    _KERNELS[dtype](
        rotary_parameters(spec), address(turned), row_stride(turned), address(key), address(value), row_stride(key),
        row_stride(value), address(positions), address(slot_mapping), cache, num_tokens, block_size,
    )  # fmt: skip
    return converted(turned, query.dtype)


def rotary_parameters(spec: RotarySpec) -> _kernels.RotaryParameters:
    """Return a layer's rotation as kernels take it."""
    assert spec.heads.head_dim <= MAX_HEAD_DIM, f"head size {spec.heads.head_dim}"
    heads = _kernels.Heads(*spec.heads)
    return _kernels.RotaryParameters(heads, address(spec.cos_sin), spec.rotary_dim, spec.is_interleaved)


def _in_rows(heads: Array, dtype: DType) -> Array:
    """Return [num_tokens, num_heads, head_dim] in `dtype` with a token's heads end to end."""
    return converted(in_heads(heads), dtype)
