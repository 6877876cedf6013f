"""KV cache tensors: keys and values of all layers, cut into blocks, by the geometry of each layer.

All that the KV cache, the swap space and memory sizing know of a model. Models that share block tables, such as a model
and its draft model, are joined into one geometry: its layers are those of all, in order. No torch.
"""

import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from quire.core.arrays import HUGE_PAGE_BYTES, Array
from quire.core.config import ELEMENT_BYTES, QUANTIZED, KVDtype
from quire.kernels.back_end import BackEnd
from quire.kernels.tensors import Tensor
from quire.model.spec import DecoderSpec, widest_window


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of one layer: [num_heads, head_dim] each per token, `num_heads` being KV heads."""

    num_heads: int
    head_dim: int
    dtype: str                       # stored elements; a torch dtype's name
    scale_dtype: str | None = None   # one scale per token and head; None: no scales
    window: int | None = None        # tokens that a token sees, itself included; None: all

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys, and as many of its values."""
        scale_bytes = 0 if self.scale_dtype is None else ELEMENT_BYTES[self.scale_dtype]
        return self.num_heads * (self.head_dim * ELEMENT_BYTES[self.dtype] + scale_bytes)


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Keys and values of a model, layer by layer."""

    layers: tuple[LayerKV, ...]

    @classmethod
    def of(cls, spec: DecoderSpec, dtype: str, scale_dtype: str | None = None) -> "KVGeometry":
        """Return the geometry of a model with cache elements of `dtype`, and scales if `scale_dtype` is not None.

        An encoder keeps nothing: its geometry has no layers.
        """
        kept = (each for each in spec.layers if each.is_causal)
        layers = (LayerKV(each.num_kv_heads, each.head_dim, dtype, scale_dtype, each.window) for each in kept)
        return cls(tuple(layers))

    def joined(self, *others: "KVGeometry") -> "KVGeometry":
        """Return the geometry of models that share block tables: the layers of this one, then those of the others."""
        return KVGeometry(sum((other.layers for other in others), self.layers))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * sum(layer.bytes_per_token for layer in self.layers)

    @property
    def quantized_dtype(self) -> str:
        """The name of --kv-cache-dtype by which layers are quantized, several in a list; empty if none is."""
        stored = {KVDtype(layer.dtype, layer.scale_dtype) for layer in self.layers}
        return ", ".join(name for name, each in QUANTIZED.items() if each in stored)

    @property
    def sliding_window(self) -> int | None:
        """The widest window, as in `widest_window`."""
        return widest_window([layer.window for layer in self.layers])

    def tensor_bytes(self, num_tokens: int) -> list[int]:
        """Return the bytes of each tensor of a cache of `num_tokens` tokens: keys of all layers, then their values."""
        return 2 * [num_tokens * layer.bytes_per_token for layer in self.layers]


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
    The first 2 MiB are on small pages, the rest on huge ones: with one token in the cache each tensor of each layer
    would take a huge page, which are 96 MB for the 48 tensors of a model of 0.5 billion parameters.
    """
    try:
        memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes:,} bytes of the KV cache: {error}") from None
    with suppress(OSError):  # a kernel without huge pages
        if num_bytes > 2 * HUGE_PAGE_BYTES:
            memory.madvise(mmap.MADV_HUGEPAGE, HUGE_PAGE_BYTES)
    return np.frombuffer(memory, np.uint8)[:num_bytes]
