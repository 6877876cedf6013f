"""KV cache in C++: the layout of its blocks, copies of them, and the write of new keys and values.

One tensor for the keys of a layer and one for its values; a block is one run of bytes in each.

    bfloat16  keys    [num_blocks, num_kv_heads, head_dim / 2, block_size, 2]    pairs of dimensions
              values  [num_blocks, num_kv_heads, block_size / 2, head_dim, 2]    pairs of tokens
    float32   keys    [num_blocks, num_kv_heads, head_dim, block_size]
              values  [num_blocks, num_kv_heads, block_size, head_dim]

A head's run of a block of 8 bits is its elements, keys [head_dim, block_size] or values [block_size, head_dim], and
behind them, unless the scales are the layer's, float32 scales [block_size]. Both tensors have the shape
[num_blocks, num_kv_heads, block_size, head_dim + 4], or without scales [.., head_dim].

Values that are parts of keys have no elements: [num_blocks, 0]. Keys are latents then. With stored scales a head's run
is elements [latent_dim, block_size], what is rotated beside them in bfloat16 as above, and scales [groups, block_size],
of LATENT_SCALE_DIMS dimensions each.

float16 models keep float32 caches.

The caches are laid out as `cache_layout` says.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.arrays import BFLOAT16, FLOAT8_E4M3, FLOAT32, Array, DType
from quire.core.config import KERNEL_BLOCK_SIZES, QUANTIZED, KVDtype
from quire.extension import _kernels
from quire.kernels.back_end import MAX_HEAD_DIM, serves_head_dim
from quire.kernels.conversion import converted
from quire.kernels.cpp.dtypes import address, in_heads, kernel_dtype, pair, row_stride
from quire.kernels.kv_cache import ONES, KVScales, by_block_bytes
from quire.kernels.paged_attention import RotarySpec

Shape = tuple[int, ...]
INT8 = np.dtype(np.int8)
DTYPES = (BFLOAT16, FLOAT32, INT8, FLOAT8_E4M3)  # element types
STORED = (KVDtype("bfloat16"), KVDtype("float32"), *QUANTIZED.values())    # storages of a cache
_FORMATS = {
    (INT8, True): (_kernels.KV_FORMATS["int8_scaled"], QUANTIZED["int8_per_token_head"]),
    (FLOAT8_E4M3, True): (_kernels.KV_FORMATS["e4m3_scaled"], QUANTIZED["fp8_per_token_head"]),
    (FLOAT8_E4M3, False): (_kernels.KV_FORMATS["e4m3"], QUANTIZED["fp8"]),
}


class CacheSizes(NamedTuple):
    """Sizes of a layer's cache, beside the number of its blocks."""

    num_kv_heads: int
    block_size: int
    head_dim: int
    latent_dim: int = 0  # values are the first so many dimensions of keys; 0: they are stored


def cache_shapes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: DType, extra_bytes: int = 0
) -> tuple[Shape, Shape]:
    """Return the shapes of a layer's keys and values with elements of `dtype`, one of `DTYPES`."""
    assert dtype in DTYPES, f"caches of {dtype}"
    assert block_size in KERNEL_BLOCK_SIZES, f"block size {block_size} is not one of {KERNEL_BLOCK_SIZES}"
    assert serves_head_dim(head_dim), f"head size {head_dim}"
    keys, values = _head_shapes(block_size, head_dim, dtype, extra_bytes)
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
    num_kv_heads, block_size, head_dim, latent_dim = sizes
    assert keys.dtype == values.dtype, f"keys of {keys.dtype}, values of {values.dtype}"
    stored, kv_format, extra_bytes = keys.dtype, _kernels.KV_FORMATS["same"], 0
    if stored.itemsize == 1:
        kv_format, own = _FORMATS[stored, keys.shape[3] != head_dim]
        extra_bytes = own.extra_bytes(head_dim, latent_dim)
    else:
        assert stored == dtype, f"caches of {stored} for kernels of {dtype}"
    key_shape, value_shape = _head_shapes(block_size, head_dim, stored, extra_bytes)
    assert keys.shape[1:] == (num_kv_heads, *key_shape), f"keys in another layout: {keys.shape}"
    has_values = values.size > 0 or not keys.size
    if has_values:
        assert values.shape == (len(keys), num_kv_heads, *value_shape), f"values in another layout: {values.shape}"
    assert keys.flags.c_contiguous, "keys with gaps"
    assert values.flags.c_contiguous, "values with gaps"
    addresses = _kernels.address(keys), _kernels.address(values) if has_values else 0
    return _kernels.LayerCache(*addresses, kv_format, *scales)


def _head_shapes(block_size: int, head_dim: int, dtype: DType, extra_bytes: int) -> tuple[Shape, Shape]:
    if dtype.itemsize == 1:
        return (block_size, head_dim + extra_bytes), (block_size, head_dim + extra_bytes)
    assert extra_bytes == 0, f"scales beside elements of {dtype}"
    if dtype == BFLOAT16:
        return (head_dim // 2, block_size, 2), (block_size // 2, head_dim, 2)
    return (head_dim, block_size), (block_size, head_dim)


def copy_blocks(
    src_caches: list[Array], dst_caches: list[Array], src: NDArray[np.int64], dst: NDArray[np.int64]
) -> None:
    """Copy what `reference.block_copy` copies. A block is one run of bytes, in memory or mapped from a file."""
    assert len(src) == len(dst)
    assert src.dtype == dst.dtype == np.int64
    if not src_caches or not len(src):
        return
    src, dst = np.ascontiguousarray(src), np.ascontiguousarray(dst)
    for block_bytes, own_sources, own_targets in by_block_bytes(src_caches, dst_caches):
        sources, destinations = (list(map(_kernels.address, pool)) for pool in (own_sources, own_targets))
        if sources == destinations and set(src.tolist()) & set(dst.tolist()):  # no plan asks for it
            for source, target in zip(own_sources, own_targets, strict=True):
                target[dst] = source[src]
            continue
        assert sources == destinations or not set(sources) & set(destinations), "pools that share memory"
        _kernels.swap_blocks(sources, destinations, block_bytes, _kernels.address(src), _kernels.address(dst), len(src))


_KERNELS = pair("kv_write")


def write_kv(
    spec: RotarySpec, query: Array, key: Array | None, value: Array | None, positions: NDArray[np.int64],
    key_cache: Array, value_cache: Array, slot_mapping: NDArray[np.int64],
) -> Array:  # fmt: skip
    """Do what `reference.kv_cache_write.write_kv` does; query, key and value may be slices of a wider projection.

    The query is rotated in place if a token's heads are contiguous; do not use the argument afterwards.
    """
    dtype, (_, num_kv_heads, head_dim) = kernel_dtype(query.dtype), spec.heads
    turned = query if spec.cos_sin is None else _in_rows(query, dtype)
    if key is None and spec.cos_sin is None:
        return query
    is_written = key is not None
    key = _in_rows(turned[:, :num_kv_heads] if key is None else key, dtype)  # not read where nothing is written
    value = key if value is None else _in_rows(value, dtype)  # not read where the cache has none
    num_tokens, block_size = len(key), block_size_of(key_cache)
    sizes = CacheSizes(num_kv_heads, block_size, head_dim, spec.value_dim)
    cache = layer_cache(key_cache, value_cache, sizes, dtype, spec.kv_scales)
    assert query.shape[1:] == spec.heads[::2], f"queries {query.shape} for {spec.heads}"
    assert key.shape == value.shape == (num_tokens, num_kv_heads, head_dim), f"keys {key.shape}"
    assert len(positions) == len(slot_mapping) == num_tokens
    assert positions.dtype == slot_mapping.dtype == np.int64
    assert positions.flags.c_contiguous
    assert slot_mapping.flags.c_contiguous
    _KERNELS[dtype](
        rotary_parameters(spec), address(turned), row_stride(turned), address(key), address(value), row_stride(key),
        row_stride(value), address(positions), address(slot_mapping) if is_written else 0, cache, num_tokens,
        block_size,
    )  # fmt: skip
    return converted(turned, query.dtype)


def rotary_parameters(spec: RotarySpec) -> _kernels.RotaryParameters:
    """Return a layer's rotation as kernels take it."""
    assert spec.heads.head_dim <= MAX_HEAD_DIM, f"head size {spec.heads.head_dim}"
    heads = _kernels.Heads(*spec.heads)
    table, rotary_dim = address(spec.cos_sin), spec.rotary_dim
    return _kernels.RotaryParameters(heads, table, rotary_dim, spec.is_interleaved, spec.rotary_start)


def _in_rows(heads: Array, dtype: DType) -> Array:
    """Return [num_tokens, num_heads, head_dim] in `dtype` with a token's heads end to end."""
    return converted(in_heads(heads), dtype)
