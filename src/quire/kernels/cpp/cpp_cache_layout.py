"""Layout of the KV cache's blocks for the C++ kernels; csrc/cache_layout.hpp has the reasons.

One tensor for the keys of a layer and one for its values; a block is one run of bytes in each.

    bfloat16  keys    [num_blocks, num_kv_heads, head_dim / 2, block_size, 2]    pairs of dimensions
              values  [num_blocks, num_kv_heads, block_size / 2, head_dim, 2]    pairs of tokens
    float32   keys    [num_blocks, num_kv_heads, head_dim, block_size]
              values  [num_blocks, num_kv_heads, block_size, head_dim]

A head's run of a block of 8 bits is its elements, keys [head_dim, block_size] or values [block_size, head_dim], and
behind them, unless the scales are the layer's, float32 scales [block_size]. Both tensors have the shape
[num_blocks, num_kv_heads, block_size, head_dim + 4], or without scales [.., head_dim].

float16 models keep float32 caches.
"""

from typing import NamedTuple

import numpy as np

from quire.core.arrays import BFLOAT16, FLOAT8_E4M3, FLOAT32, Array, DType
from quire.core.config import KERNEL_BLOCK_SIZES
from quire.core.kv_dtypes import QUANTIZED, KVDtype
from quire.kernels.cache_layout import ONES, KVScales
from quire.kernels.cpp import _kernels
from quire.kernels.support import serves_head_dim

Shape = tuple[int, ...]
INT8 = np.dtype(np.int8)
DTYPES = (BFLOAT16, FLOAT32, INT8, FLOAT8_E4M3)  # element types
STORED = (KVDtype("bfloat16"), KVDtype("float32"), *QUANTIZED.values())    # storages of a cache
SCALE_BYTES = 4
_FORMATS = {
    (INT8, True): _kernels.KV_FORMATS["int8_scaled"],
    (FLOAT8_E4M3, True): _kernels.KV_FORMATS["e4m3_scaled"],
    (FLOAT8_E4M3, False): _kernels.KV_FORMATS["e4m3"],
}


class CacheSizes(NamedTuple):
    """Sizes of a layer's cache, beside the number of its blocks."""

    num_kv_heads: int
    block_size: int
    head_dim: int


def cache_shapes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: DType, scale_bytes: int = 0
) -> tuple[Shape, Shape]:
    """Return the shapes of a layer's keys and values with elements of `dtype`, one of `DTYPES`."""
    assert dtype in DTYPES, f"caches of {dtype}"
    assert block_size in KERNEL_BLOCK_SIZES, f"block size {block_size} is not one of {KERNEL_BLOCK_SIZES}"
    assert serves_head_dim(head_dim), f"head size {head_dim}"
    keys, values = _head_shapes(block_size, head_dim, dtype, scale_bytes)
    return (num_blocks, num_kv_heads, *keys), (num_blocks, num_kv_heads, *values)


def block_size_of(keys: Array) -> int:
    """Return the tokens of a block of a layer's keys."""
    num_tokens: int = keys.shape[2 if keys.itemsize == 1 else 3]
    return num_tokens


def layer_cache(
    keys: Array, values: Array, sizes: CacheSizes, dtype: DType, scales: KVScales = ONES
) -> _kernels.LayerCache:
    """Return a layer's caches as kernels of `dtype` take them; assert that they are in the layout of `cache_shapes`.

    Every layer of every step that is not fused pays for this. The kernels read the tensors' memory.
    """
    num_kv_heads, block_size, head_dim = sizes
    assert keys.dtype == values.dtype, f"keys of {keys.dtype}, values of {values.dtype}"
    stored, kv_format, scale_bytes = keys.dtype, _kernels.KV_FORMATS["same"], 0
    if stored.itemsize == 1:
        scale_bytes = SCALE_BYTES if keys.shape[3] != head_dim else 0
        kv_format = _FORMATS[stored, scale_bytes > 0]
    else:
        assert stored == dtype, f"caches of {stored} for kernels of {dtype}"
    key_shape, value_shape = _head_shapes(block_size, head_dim, stored, scale_bytes)
    assert keys.shape[1:] == (num_kv_heads, *key_shape), f"keys in another layout: {keys.shape}"
    assert values.shape == (len(keys), num_kv_heads, *value_shape), f"values in another layout: {values.shape}"
    assert keys.flags.c_contiguous, "keys with gaps"
    assert values.flags.c_contiguous, "values with gaps"
    return _kernels.LayerCache(_kernels.address(keys), _kernels.address(values), kv_format, *scales)


def _head_shapes(block_size: int, head_dim: int, dtype: DType, scale_bytes: int) -> tuple[Shape, Shape]:
    if dtype.itemsize == 1:
        return (block_size, head_dim + scale_bytes), (block_size, head_dim + scale_bytes)
    assert scale_bytes == 0, f"scales beside elements of {dtype}"
    if dtype == BFLOAT16:
        return (head_dim // 2, block_size, 2), (block_size // 2, head_dim, 2)
    return (head_dim, block_size), (block_size, head_dim)
