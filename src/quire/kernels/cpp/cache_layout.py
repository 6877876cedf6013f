"""Layout of the KV cache's blocks for the C++ kernels; csrc/cache_layout.hpp has the reasons.

One tensor for the keys of a layer and one for its values; a block is one run of bytes in each.

    bfloat16  keys    [num_blocks, num_kv_heads, head_dim / 2, block_size, 2]    pairs of dimensions
              values  [num_blocks, num_kv_heads, block_size / 2, head_dim, 2]    pairs of tokens
    float32   keys    [num_blocks, num_kv_heads, head_dim, block_size]
              values  [num_blocks, num_kv_heads, block_size, head_dim]

float16 models keep float32 caches.
"""

import torch
from torch import Tensor

from quire.core.config import KERNEL_BLOCK_SIZES
from quire.kernels.cpp.limits import serves_head_dim

Shape = tuple[int, ...]
DTYPES = (torch.bfloat16, torch.float32)  # that a cache may have


def cache_shapes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, scale_bytes: int = 0
) -> tuple[Shape, Shape]:
    """Return the shapes of a layer's keys and values stored in `dtype`, one of `DTYPES`."""
    assert dtype in DTYPES, f"caches of {dtype}"
    assert scale_bytes == 0, "scales"
    assert block_size in KERNEL_BLOCK_SIZES, f"block size {block_size} is not one of {KERNEL_BLOCK_SIZES}"
    assert serves_head_dim(head_dim), f"head size {head_dim}"
    keys, values = _head_shapes(block_size, head_dim, dtype)
    return (num_blocks, num_kv_heads, *keys), (num_blocks, num_kv_heads, *values)


def check_caches(
    keys: Tensor, values: Tensor, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Assert that a layer's caches are stored in `dtype`, which the kernel reads, in the layout of `cache_shapes`.

    Every layer of every step pays for this.
    """
    num_blocks = keys.shape[0]
    assert keys.dtype == values.dtype == dtype, f"caches of {keys.dtype} and {values.dtype} for kernels of {dtype}"
    key_shape, value_shape = _head_shapes(block_size, head_dim, dtype)
    assert keys.shape == (num_blocks, num_kv_heads, *key_shape), f"keys in another layout: {keys.shape}"
    assert values.shape == (num_blocks, num_kv_heads, *value_shape), f"values in another layout: {values.shape}"
    assert keys.is_contiguous(), "keys with gaps"
    assert values.is_contiguous(), "values with gaps"


def _head_shapes(block_size: int, head_dim: int, dtype: torch.dtype) -> tuple[Shape, Shape]:
    if dtype == torch.bfloat16:
        return (head_dim // 2, block_size, 2), (block_size // 2, head_dim, 2)
    return (head_dim, block_size), (block_size, head_dim)
