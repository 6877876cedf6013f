"""KVCache: the tensors that hold keys and values, two per layer, cut into blocks. Knows no owner of a block."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.back_end import BackEnd
from quire.model.spec import DecoderSpec

ALIGNMENT = 64  # bytes: a cache line, and a vector register


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of all layers, each [num_blocks, ...]: what stands in a block is the back end's layout."""

    keys: list[Tensor]
    values: list[Tensor]
    block_size: int           # tokens per block

    @classmethod
    def allocate(
        cls,
        spec: DecoderSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        back_end: BackEnd,
        allocator: Callable[[int], Tensor] | None = None,
    ) -> "KVCache":
        """Return a cache for a model of `dtype`. Of zeros: a tile may reach past a context, and 0 x NaN is NaN.

        `allocator` returns memory for one tensor, uint8 [num_bytes] of zeros, aligned; None is the host's.
        """
        layout, allocator = back_end.cache_layout, allocator or _zeros
        cache_dtype = layout.dtype(dtype)

        def tensor(shape: tuple[int, ...]) -> Tensor:
            return allocator(math.prod(shape) * cache_dtype.itemsize).view(cache_dtype).view(shape)

        shapes = layout.shapes(num_blocks, block_size, spec.num_kv_heads, spec.head_dim, dtype)
        keys, values = ([tensor(shape) for _ in range(spec.num_layers)] for shape in shapes)
        return cls(keys, values, block_size)


def _zeros(num_bytes: int) -> Tensor:
    """Return zeros that take memory only where something has been written.

    NumPy asks the system for zero pages; `torch.zeros` writes them, 4 s for each GB of a cache that may stay empty.
    """
    memory = np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8)
    skipped = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[skipped : skipped + num_bytes])
