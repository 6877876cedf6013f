"""Caches in the layout of the C++ kernels, made from plain ones and back."""

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.paged_attention import AttentionMetadata, AttentionSpec
from quire.kernels.reference.back_ends import TORCH
from support.cpp_kernels import cache_shapes, kernel_dtype, paged_attention


def pack(
    keys: Tensor, values: Tensor, head_dim: int | None = None, latent_dim: int = 0
) -> tuple[Tensor, Tensor]:
    """Lay out caches that are plain, [num_blocks, block_size, num_kv_heads, head_dim], for the kernels.

    `head_dim` is needed in 8 bits, where the last dimension has a scale, too; `latent_dim`: if keys are latents.
    """
    if keys.itemsize == 1:
        assert head_dim is not None
        if latent_dim and keys.shape[3] > head_dim:
            keys = _pack_latents(keys, head_dim, latent_dim)
            return keys, keys
        return _pack_bytes(keys, head_dim, is_transposed=True), _pack_bytes(values, head_dim, is_transposed=False)
    num_blocks, block_size, num_kv_heads, head_dim = keys.shape
    shapes = cache_shapes(num_blocks, block_size, num_kv_heads, head_dim, kernel_dtype(keys.dtype))
    keys, values = (x.to(kernel_dtype(x.dtype)).transpose(1, 2) for x in (keys, values))  # [.., heads, tokens, dims]
    if keys.dtype == torch.bfloat16:
        keys = torch.unflatten(keys, 3, (-1, 2)).transpose(2, 3)      # [.., heads, pairs of dims, tokens, 2]
        values = torch.unflatten(values, 2, (-1, 2)).transpose(3, 4)  # [.., heads, pairs of tokens, dims, 2]
    else:
        keys = keys.transpose(2, 3)
    assert (keys.shape, values.shape) == shapes
    return keys.contiguous(), values.contiguous()


def _pack_bytes(cache: Tensor, head_dim: int, *, is_transposed: bool) -> Tensor:
    """Lay out heads of 8 bits: elements, by dimension or by token, and the scales of all tokens behind them."""
    num_blocks, block_size, num_kv_heads, width = cache.shape
    heads = cache.view(torch.int8).transpose(1, 2)                    # [.., heads, tokens, width]
    elements, scales = heads.split([head_dim, width - head_dim], dim=3)
    elements = elements.transpose(2, 3) if is_transposed else elements
    runs = torch.cat([elements.flatten(2), scales.flatten(2)], dim=2)
    shape = cache_shapes(num_blocks, block_size, num_kv_heads, head_dim, cache.dtype, width - head_dim)[0]
    return runs.view(shape).view(cache.dtype)


def _pack_latents(cache: Tensor, head_dim: int, latent_dim: int) -> Tensor:
    """Lay out latents: elements by dimension, rotated ones by pair of dimensions, scales by group."""
    num_blocks, block_size, num_kv_heads, width = cache.shape
    heads = cache.view(torch.int8).transpose(1, 2)                    # [.., heads, tokens, width]
    sizes = latent_dim, 2 * (head_dim - latent_dim), width - 2 * head_dim + latent_dim
    parts = zip(heads.split(sizes, dim=3), (1, 4, 4), strict=True)    # bytes of what stays together
    runs = [part.unflatten(3, (-1, count)).transpose(2, 3).flatten(2) for part, count in parts]
    shape = cache_shapes(num_blocks, block_size, num_kv_heads, head_dim, cache.dtype, width - head_dim)[0]
    return torch.cat(runs, dim=2).view(shape).view(cache.dtype)


def unpack(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `pack`, except for the dtype."""
    if keys.dtype == torch.bfloat16:
        keys = keys.transpose(2, 3).flatten(3)
        values = values.transpose(3, 4).flatten(2, 3)
    else:
        keys = keys.transpose(2, 3)
    return keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()


def _packed_attention(
    spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata
) -> Tensor:
    keys, values = pack(keys, values, query.shape[2], spec.value_dim)
    if spec.value_dim:
        values = values.new_empty(len(values), 0)  # parts of the keys
    return paged_attention(spec, query, keys, values, metadata)


CPP = replace(TORCH, name="cpp", paged_attention=_packed_attention)  # attention over plain caches, by the kernels
