"""How a back end lays out the blocks of the KV cache: the shapes and the dtype of a layer's two tensors.

Whatever the layout, a block is one run of bytes in each tensor, and the first dimension counts blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """`shapes(num_blocks, block_size, num_kv_heads, head_dim, dtype)` gives those of keys and values for a model of
    `dtype`; `dtype` maps the model's dtype to the cache's.
    """

    shapes: Callable[[int, int, int, int, torch.dtype], tuple[Shape, Shape]]
    dtype: Callable[[torch.dtype], torch.dtype]


def _plain_shapes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Shape, Shape]:
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    return shape, shape


PLAIN = CacheLayout(shapes=_plain_shapes, dtype=lambda dtype: dtype)
