"""Paged attention in C++; the meaning is that of `quire.kernels.reference`; csrc/attention.cpp explains it.

The caches are laid out as `cache_layout` says.
"""

from dataclasses import fields

import numpy as np

from quire.core.arrays import Array
from quire.extension import _kernels
from quire.kernels.conversion import converted
from quire.kernels.cpp.cpp_kv_cache import CacheSizes, layer_cache
from quire.kernels.cpp.dtypes import address, in_heads, kernel_dtype, pair, row_stride
from quire.kernels.paged_attention import AttentionMetadata, AttentionSpec

_KERNELS = pair("attention")


def paged_attention(
    spec: AttentionSpec, query: Array, key_cache: Array, value_cache: Array, metadata: AttentionMetadata
) -> Array:
    """Attend as `reference` does, with the metadata of the step; caches in the kernels' layout.

    query [num_tokens, num_heads, head_dim] may be a slice of a wider projection: only a token's heads stand together.
    """
    dtype = kernel_dtype(query.dtype)
    if dtype != query.dtype:
        found = paged_attention(spec, converted(query, dtype), key_cache, value_cache, metadata)
        return converted(found, query.dtype)
    num_heads, num_kv_heads, head_dim = spec.heads
    num_tokens = metadata.num_tokens
    assert query.shape == (num_tokens, num_heads, head_dim), f"queries {query.shape} for {num_tokens} of {spec.heads}"
    sizes = CacheSizes(num_kv_heads, metadata.block_size, head_dim, spec.value_dim)
    cache = layer_cache(key_cache, value_cache, sizes, dtype, spec.kv_scales)
    query = in_heads(query)
    out = np.empty((num_tokens, num_heads, spec.output_dim), dtype)
    _KERNELS[dtype](
        attention_parameters(spec), address(query), row_stride(query), cache, address(out), num_heads * spec.output_dim,
        *metadata_arguments(metadata), metadata.block_size,
    )  # fmt: skip
    return out


def attention_parameters(spec: AttentionSpec) -> _kernels.AttentionParameters:
    """Return a layer's attention as kernels take it: the spec's fields, in their order, but for the cache's scales."""
    heads, *others, _ = (getattr(spec, field.name) for field in fields(spec))
    passed = (address(each) if each is None or isinstance(each, np.ndarray) else each for each in others)
    return _kernels.AttentionParameters(_kernels.Heads(*heads), *passed)


def metadata_arguments(metadata: AttentionMetadata) -> tuple[int, ...]:
    """Return the kernels' arguments from attention metadata, in their order."""
    tables, starts, lens, ends = metadata.block_tables, metadata.query_starts, metadata.context_lens, metadata.seen_ends
    assert tables.dtype == starts.dtype == lens.dtype == np.int32, "int32 tables and lengths"
    assert tables.strides[1] == tables.itemsize or not tables.size, "tables with gaps"
    assert ends is None or (ends.dtype, ends.shape) == (np.int32, (metadata.num_tokens,)), "an end for each token"
    at = _kernels.address
    seen_ends = 0 if ends is None else at(ends)
    return at(tables), at(starts), at(lens), seen_ends, tables.strides[0] // tables.itemsize, len(lens)
