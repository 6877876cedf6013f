"""Paged attention in C++; the meaning is that of `quire.kernels.reference`; csrc/attention.cpp explains it.

The caches are laid out as `cache_layout` says.
"""

from dataclasses import fields

import torch
from torch import Tensor

from quire.kernels.cpp import _kernels
from quire.kernels.cpp.cpp_cache_layout import CacheSizes, layer_cache
from quire.kernels.cpp.dtypes import address, kernel_dtype, pair
from quire.kernels.paged_attention import AttentionMetadata, AttentionSpec

_KERNELS = pair("attention")


def paged_attention(
    spec: AttentionSpec, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata
) -> Tensor:
    """Attend as `reference` does, with the metadata of the step; caches in the kernels' layout.

    query [num_tokens, num_heads, head_dim] may be a slice of a wider projection: only a token's heads stand together.
    """
    dtype = kernel_dtype(query.dtype)
    if dtype != query.dtype:
        return paged_attention(spec, query.to(dtype), key_cache, value_cache, metadata).to(query.dtype)
    num_heads, num_kv_heads, head_dim = spec.heads
    num_tokens = metadata.num_tokens
    assert query.shape == (num_tokens, num_heads, head_dim), f"queries {query.shape} for {num_tokens} of {spec.heads}"
    cache = layer_cache(
        key_cache, value_cache, CacheSizes(num_kv_heads, metadata.block_size, head_dim), dtype, spec.kv_scales
    )
    token_stride, head_stride, stride = query.stride()
    if stride != 1 or head_stride != head_dim:
        query, token_stride = query.contiguous(), num_heads * head_dim
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=dtype)
    _KERNELS[dtype](
        attention_parameters(spec), query.data_ptr(), token_stride, cache, out.data_ptr(), num_heads * head_dim,
        *metadata_arguments(metadata), metadata.block_size,
    )  # fmt: skip
    return out


def attention_parameters(spec: AttentionSpec) -> _kernels.AttentionParameters:
    """Return a layer's attention as kernels take it: the spec's fields, in their order, but for the cache's scales."""
    heads, *others, _ = (getattr(spec, field.name) for field in fields(spec))
    passed = (address(each) if each is None or isinstance(each, Tensor) else each for each in others)
    return _kernels.AttentionParameters(_kernels.Heads(*heads), *passed)


def metadata_arguments(metadata: AttentionMetadata) -> tuple[int, ...]:
    """Return the kernels' arguments from attention metadata, in their order."""
    tables, starts, lens = metadata.block_tables, metadata.query_starts, metadata.context_lens
    return tables.data_ptr(), starts.data_ptr(), lens.data_ptr(), tables.stride(0), len(lens)
