"""Caches in the layout of the C++ kernels, made from plain ones and back."""

import torch
from torch import Tensor

from quire.kernels.cpp.cache_layout import cache_shapes
from quire.kernels.cpp.dtypes import kernel_dtype


def pack(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Lay out caches that are plain, [num_blocks, block_size, num_kv_heads, head_dim], for the kernels."""
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


def unpack(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `pack`, except for the dtype."""
    if keys.dtype == torch.bfloat16:
        keys = keys.transpose(2, 3).flatten(3)
        values = values.transpose(3, 4).flatten(2, 3)
    else:
        keys = keys.transpose(2, 3)
    return keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()
