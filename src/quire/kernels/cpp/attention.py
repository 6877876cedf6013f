"""Paged attention in C++; the meaning is `quire.kernels.paged_attention.reference`'s. csrc/attention.cpp explains it.

The caches are laid out as `cache_layout` says.
"""

import torch
from torch import Tensor

from quire.kernels.cpp.cache_layout import CacheSizes, layer_cache
from quire.kernels.cpp.dtypes import address, kernel_dtype, pair
from quire.kernels.kv_quantization import ONES, KVScales
from quire.kernels.paged_attention import AttentionMetadata, num_ahead

_KERNELS = pair("attention")


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    scales: KVScales = ONES,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    *,
    is_causal: bool = True,
) -> Tensor:
    """Attend as `reference` does, with the metadata of the step; caches in the kernels' layout, scale above 0.

    query [num_tokens, num_heads, head_dim] may be a slice of a wider projection: only a token's heads stand together.
    """
    dtype = kernel_dtype(query.dtype)
    if dtype != query.dtype:
        converted = query.to(dtype)
        return paged_attention(
            converted, key_cache, value_cache, metadata, scale, window, scales, softcap, sinks, is_causal=is_causal
        ).to(query.dtype)
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[1]
    assert num_tokens == metadata.num_tokens, f"{num_tokens} queries for metadata of {metadata.num_tokens}"
    sizes = CacheSizes(num_kv_heads, metadata.block_size, head_dim)
    cache = layer_cache(key_cache, value_cache, sizes, dtype, scales)
    assert num_heads % num_kv_heads == 0, f"{num_heads} heads over {num_kv_heads}"
    assert scale > 0, f"scale {scale}"
    assert sinks is None or (sinks.shape == (num_heads,) and sinks.dtype == torch.float32 and sinks.is_contiguous())
    token_stride, head_stride, stride = query.stride()
    if stride != 1 or head_stride != head_dim:
        query, token_stride = query.contiguous(), num_heads * head_dim
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=dtype)
    _KERNELS[dtype](
        query.data_ptr(), token_stride, cache, out.data_ptr(), num_heads * head_dim, *metadata_arguments(metadata),
        num_heads, num_kv_heads, head_dim, metadata.block_size, scale, window or 0, softcap,
        address(sinks), num_ahead(window, is_causal=is_causal),
    )  # fmt: skip
    return out


def metadata_arguments(metadata: AttentionMetadata) -> tuple[int, ...]:
    """Return the kernels' arguments from attention metadata, in their order."""
    tables, starts, lens = metadata.block_tables, metadata.query_starts, metadata.context_lens
    return tables.data_ptr(), starts.data_ptr(), lens.data_ptr(), tables.stride(0), len(lens)
