"""KV cache tensors: keys and values of all layers, cut into blocks, by the geometry of each layer.

All that the KV cache, the swap space and memory sizing know of a model. Models that share block tables, such as a model
and its draft model, are joined into one geometry: its layers are those of all, in order. No torch.
"""

import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from quire.core.arrays import HUGE_PAGE_BYTES, Array
from quire.core.config import ELEMENT_BYTES, QUANTIZED, KVDtype
from quire.kernels.back_end import BackEnd
from quire.kernels.delta_net import DeltaHeads, StateShape, ring_length
from quire.kernels.kv_cache import CacheLayout, Shape
from quire.kernels.mamba import MambaHeads
from quire.kernels.tensors import DType, Tensor
from quire.model.spec import DecoderSpec, DeltaNet, Mamba, ShortConv, widest_window


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of one layer, per token [num_heads, head_dim] each. `num_heads`: KV heads."""

    num_heads: int
    head_dim: int
    dtype: str                       # stored elements; a torch dtype's name
    scale_dtype: str | None = None   # dtype of a token's scales under a head, as in `KVDtype`; None: no scales
    window: int | None = None        # tokens that a token sees, itself included; None: all
    latent_dim: int = 0              # values are the first so many dimensions of keys, and have no tensor; 0: they have

    def block_bytes(self, block_size: int) -> tuple[int, int]:
        """Return the bytes of the keys, and of the values, of a block of `block_size` tokens."""
        num_bytes = block_size * self.num_heads * (self.head_dim * ELEMENT_BYTES[self.dtype] + self.extra_bytes)
        return num_bytes, 0 if self.latent_dim else num_bytes

    @property
    def extra_bytes(self) -> int:
        """Bytes of a token's key, or of its value, under one head beyond an element for each dimension."""
        return KVDtype(self.dtype, self.scale_dtype).extra_bytes(self.head_dim, self.latent_dim)


@dataclass(frozen=True, slots=True)
class LayerTail:
    """Tails of one layer: what a short convolution needs of the last tokens of each block, [length, width].

    They stand where keys do in a cache, and there are no values. A block has no more than one for each token.
    """

    length: int
    width: int
    dtype: str
    scale_dtype: None = None

    def block_bytes(self, block_size: int) -> tuple[int, int]:
        """Return the bytes of a block's tail, and 0."""
        return min(self.length, block_size) * self.width * ELEMENT_BYTES[self.dtype], 0


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Keys and values of a model, or tails, by the layers that keep some; beside them the states of sequences."""

    layers: tuple[LayerKV | LayerTail, ...]
    states: tuple[StateShape, ...] = ()

    @classmethod
    def of(
        cls, spec: DecoderSpec, dtype: str, scale_dtype: str | None = None, *, tail_dtype: str | None = None,
        max_truncated: int = 1,
    ) -> "KVGeometry":  # fmt: skip
        """Return the geometry of a model with cache elements of `dtype`, and scales if `scale_dtype` is not None.

        `tail_dtype`: of tails, and of inputs beside states; None: `dtype`. `max_truncated`: the most computed tokens
        that are taken back before the next step; a tail, or a state, has as many tokens more than a convolution needs.
        An encoder keeps nothing: its geometry has no layers. The last layer of a draft head is a tail, what it reads of
        the target behind the last token in a block, and the number of tokens up to it (`HeadDrafter`).
        """
        layers, states = list[LayerKV | LayerTail](), list[StateShape]()
        for mixer in (each for layer in spec.layers for each in layer.mixers) if spec.is_causal else ():
            if isinstance(mixer, DeltaNet):
                sizes = mixer.num_key_heads, mixer.num_value_heads, mixer.key_dim, mixer.value_dim
                heads = DeltaHeads(*sizes, has_row_decays=mixer.low_rank > 0)
                states.append(StateShape(heads, ring_length(mixer.taps, max_truncated), tail_dtype or dtype))
                continue
            if isinstance(mixer, Mamba):
                own = MambaHeads(mixer.num_groups, mixer.num_heads, mixer.state_dim, mixer.head_dim)
                states.append(StateShape(own, ring_length(mixer.taps, max_truncated), tail_dtype or dtype))
                continue
            if isinstance(mixer, ShortConv):
                layers.append(LayerTail(mixer.taps - 1 + max_truncated, mixer.width, tail_dtype or dtype))
                continue
            if mixer.cache_layer is not None:
                continue
            layers.append(LayerKV(
                mixer.num_kv_heads, mixer.head_dim, dtype, scale_dtype, mixer.window, mixer.key_value_dim
            ))  # fmt: skip
        if spec.is_draft_head:
            layers.append(LayerTail(1, spec.hidden_size + 1, tail_dtype or dtype))
        return cls(tuple(layers), tuple(states))

    @property
    def has_tails(self) -> bool:
        """True if a block can be found only as a whole: its tail is that of its end."""
        return any(isinstance(layer, LayerTail) for layer in self.layers)

    def joined(self, *others: "KVGeometry") -> "KVGeometry":
        """Return the geometry of models that share block tables: the layers of this one, then those of the others."""
        layers = sum((other.layers for other in others), self.layers)
        return KVGeometry(layers, sum((other.states for other in others), self.states))

    @property
    def num_layers(self) -> int:
        """Layers with a cache, states not among them."""
        return len(self.layers)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a sequence's states at one place, of all layers; 0: the model has none."""
        return sum(state.num_bytes for state in self.states)

    def bytes_per_token(self, block_size: int) -> int:
        """Return the bytes of one token's keys and values over all layers, with its share of tails, rounded up."""
        return -(-sum(sum(layer.block_bytes(block_size)) for layer in self.layers) // block_size)

    @property
    def quantized_dtype(self) -> str:
        """The name of --kv-cache-dtype by which layers are quantized, several in a list; empty if none is."""
        stored = {KVDtype(layer.dtype, layer.scale_dtype) for layer in self.layers}
        return ", ".join(name for name, each in QUANTIZED.items() if each in stored)

    @property
    def sliding_window(self) -> int | None:
        """The widest window, as in `widest_window`."""
        return widest_window([layer.window for layer in self.layers if isinstance(layer, LayerKV)])

    def tensor_bytes(self, num_blocks: int, block_size: int) -> list[int]:
        """Return the bytes of each of `KVCache.tensors` of a cache of so many blocks."""
        keys, values = zip(*(layer.block_bytes(block_size) for layer in self.layers), strict=True)
        return [num_blocks * num_bytes for num_bytes in (*keys, *filter(None, values))]


ALIGNMENT = 64  # bytes: a cache line, and a vector register; a page has more


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of the layers that keep some, each [num_blocks, ...] in the back end's layout.

    Values of a layer without values have no elements; tails stand where keys do.

    The layers may be those of several models: one block table serves all, and whatever copies, swaps or clears a block
    does so in `tensors`, that is for every model.
    """

    keys: list[Tensor]
    values: list[Tensor]
    block_size: int           # tokens per block
    states: list[Tensor] = field(default_factory=list)  # one for each layer that has some, uint8 [num_slots, num_bytes]

    @classmethod
    def allocate(
        cls,
        geometry: KVGeometry,
        num_blocks: int,
        block_size: int,
        back_end: BackEnd,
        allocator: Callable[[int], Tensor] | None = None,
        num_slots: int = 0,
    ) -> "KVCache":
        """Return a cache of zeros: a tile may reach past a context, and 0 x NaN is NaN. `num_slots`: of states.

        `allocator` returns memory for one tensor, uint8 [num_bytes] of zeros, aligned; None is the host's. Raises
        ConfigError for a dtype that the back end does not serve.
        """
        layout, allocator = back_end.cache_layout, allocator or _zeros

        def taken(memory: Tensor) -> Tensor:
            return back_end.library.tensor(memory) if isinstance(memory, np.ndarray) else memory

        dtypes = [layout.check(KVDtype(layer.dtype, layer.scale_dtype)) for layer in geometry.layers]
        shapes = [
            _shapes(layer, layout, num_blocks, block_size, dtype)
            for layer, dtype in zip(geometry.layers, dtypes, strict=True)
        ]
        keys, values = (
            [
                taken(allocator(math.prod(shape[kind]) * dtype.itemsize)).view(dtype).reshape(shape[kind])
                for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
            for kind in (0, 1)
        )
        slots = [taken(allocator(num_slots * each.num_bytes)) for each in geometry.states]
        states = [memory.reshape(num_slots, -1) for memory in slots] if num_slots else []
        return cls(keys, values, block_size, states)

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor of which block i is a part of block i: keys of all layers, then values where there are any."""
        return [*self.keys, *(values for values in self.values if 0 not in values.shape[1:])]

    def joined(self, other: "KVCache") -> "KVCache":
        """Return the cache of two models, the layers of `other` last, which may have more blocks."""
        assert self.block_size == other.block_size, f"blocks of {self.block_size} and {other.block_size} tokens"
        states = [*self.states, *other.states]
        return KVCache([*self.keys, *other.keys], [*self.values, *other.values], self.block_size, states)

    def split(self, num_layers: Sequence[int]) -> list["KVCache"]:
        """Return the part of each model: views of so many layers, in order. They must add up to all.

        Every part has all states: of several models only the first may have some.
        """
        assert sum(num_layers) == len(self.keys), f"{list(num_layers)} of {len(self.keys)} layers"
        starts = accumulate(num_layers, initial=0)
        return [KVCache(self.keys[a:b], self.values[a:b], self.block_size, self.states) for a, b in pairwise(starts)]


def _shapes(
    layer: LayerKV | LayerTail, layout: CacheLayout, num_blocks: int, block_size: int, dtype: DType
) -> tuple[Shape, Shape]:
    """Return the shapes of a layer's two tensors."""
    if isinstance(layer, LayerTail):
        return (num_blocks, min(layer.length, block_size), layer.width), (num_blocks, 0)
    keys, values = layout.shapes(num_blocks, block_size, layer.num_heads, layer.head_dim, dtype, layer.extra_bytes)
    return keys, (num_blocks, 0) if layer.latent_dim else values


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
