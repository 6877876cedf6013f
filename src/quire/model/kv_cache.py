"""KV cache tensors: keys and values of all layers, cut into blocks. Knows no owner of a block."""

import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from quire.core.arrays import Array
from quire.core.kv_dtypes import KVDtype
from quire.kernels.back_end import BackEnd
from quire.kernels.tensors import Tensor
from quire.model.kv_geometry import KVGeometry

ALIGNMENT = 64  # bytes: a cache line, and a vector register; a page has more


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of all layers, each [num_blocks, ...] in the back end's layout.

    The layers may be those of several models: one block table serves all, and whatever copies, swaps or clears a block
    does so in `tensors`, that is for every model.
    """

    keys: list[Tensor]
    values: list[Tensor]
    block_size: int           # tokens per block

    @classmethod
    def allocate(
        cls,
        geometry: KVGeometry,
        num_blocks: int,
        block_size: int,
        back_end: BackEnd,
        allocator: Callable[[int], Tensor] | None = None,
    ) -> "KVCache":
        """Return a cache of zeros: a tile may reach past a context, and 0 x NaN is NaN.

        `allocator` returns memory for one tensor, uint8 [num_bytes] of zeros, aligned; None is the host's. Raises
        ConfigError for a dtype that the back end does not serve.
        """
        layout, allocator = back_end.cache_layout, allocator or _zeros

        def taken(memory: Tensor) -> Tensor:
            return back_end.library.tensor(memory) if isinstance(memory, np.ndarray) else memory

        stored = [KVDtype(layer.dtype, layer.scale_dtype) for layer in geometry.layers]
        dtypes = [layout.check(each) for each in stored]
        shapes = [
            layout.shapes(num_blocks, block_size, layer.num_heads, layer.head_dim, dtype, each.scale_bytes)
            for layer, dtype, each in zip(geometry.layers, dtypes, stored, strict=True)
        ]
        keys, values = (
            [
                taken(allocator(math.prod(shape[kind]) * dtype.itemsize)).view(dtype).reshape(shape[kind])
                for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
            for kind in (0, 1)
        )
        return cls(keys, values, block_size)

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor of which block i is a part of block i: keys of all layers, then values."""
        return [*self.keys, *self.values]

    def joined(self, other: "KVCache") -> "KVCache":
        """Return the cache of two models, the layers of `other` last, which may have more blocks."""
        assert self.block_size == other.block_size, f"blocks of {self.block_size} and {other.block_size} tokens"
        return KVCache([*self.keys, *other.keys], [*self.values, *other.values], self.block_size)

    def split(self, num_layers: Sequence[int]) -> list["KVCache"]:
        """Return the part of each model: views of so many layers, in order. They must add up to all."""
        assert sum(num_layers) == len(self.keys), f"{list(num_layers)} of {len(self.keys)} layers"
        starts = accumulate(num_layers, initial=0)
        return [KVCache(self.keys[a:b], self.values[a:b], self.block_size) for a, b in pairwise(starts)]


def _zeros(num_bytes: int) -> Array:
    """Return zeros that take memory only where something has been written, aligned to a page.

    `np.zeros` writes them where `calloc` finds a free block of that size, as in a process that had a model before.
    """
    try:
        memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes:,} bytes of the KV cache: {error}") from None
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:num_bytes]
