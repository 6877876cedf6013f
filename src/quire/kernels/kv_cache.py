"""KV cache of a back end: shapes and dtype of a layer's two tensors, and groups of caches for block copies.

Whatever the layout, a block is one run of bytes in each tensor, its scales among them, and the first dimension counts
blocks.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.arrays import dtype_name
from quire.core.config import QUANTIZED, KVDtype
from quire.core.errors import ConfigError
from quire.kernels.tensors import DType, Tensor, is_contiguous

Shape = tuple[int, ...]


class KVScales(NamedTuple):
    """Scales of a layer's keys and of its values, where a cache of 8 bits stores none."""

    key: float = 1.0
    value: float = 1.0


ONES = KVScales()


class CacheShapes(Protocol):
    """Shapes of a layer's keys and values."""

    def __call__(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: DType,
        extra_bytes: int = 0,
    ) -> tuple[Shape, Shape]:
        """Return the shapes for elements of `dtype`, with `extra_bytes` of scales per token and head, and, of latents,
        of dimensions in 16 bits.
        """


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Layout of one back end.

    `own_dtype` maps a model's dtype to the one that its keys and values are stored in by default; `dtypes` are all that
    the kernels read and write.
    """

    shapes: CacheShapes
    own_dtype: Callable[[DType], DType]
    dtypes: tuple[KVDtype, ...]
    dtype_of: Callable[[str], DType]  # from a dtype's name

    def stored_dtype(self, model_dtype: DType, asked: str = "auto") -> KVDtype:
        """Return the storage of the cache of a model of `model_dtype`; ConfigError if `asked` is not served beside it.

        `asked`: a value of --kv-cache-dtype.
        """
        own = dtype_name(self.own_dtype(model_dtype))
        if QUANTIZED.get(asked) in self.dtypes:
            return QUANTIZED[asked]
        if asked not in ("auto", own):
            raise ConfigError(
                f"kv_cache_dtype {asked!r} is not supported: keys and values of a {dtype_name(model_dtype)} model are "
                f"stored in {own} here"
                + "".join(f" or {name}" for name, stored in QUANTIZED.items() if stored in self.dtypes)
            )
        return KVDtype(own)

    def check(self, stored: KVDtype) -> DType:
        """Return the dtype of the elements; ConfigError if this back end's kernels do not read this storage."""
        if stored not in self.dtypes:
            raise ConfigError(
                f"a KV cache of {_described(stored)} is not supported; this back end stores "
                f"{', '.join(map(_described, self.dtypes))}"
            )
        return self.dtype_of(stored.element)


def _described(stored: KVDtype) -> str:
    return stored.element if stored.scale is None else f"{stored.element} with scales of {stored.scale}"


# From source caches to destinations at the same places in the lists, blocks at int64 [num_copies] in host memory each.
CopyBlocks = Callable[[list[Tensor], list[Tensor], NDArray[np.int64], NDArray[np.int64]], None]


def by_block_bytes(
    src_caches: list[Tensor], dst_caches: list[Tensor]
) -> Iterator[tuple[int, list[Tensor], list[Tensor]]]:
    """Yield the bytes of a block, and the pairs of caches that have such blocks: layers and models may differ.

    Caches are contiguous, and those of a pair have blocks of one size.
    """
    assert len(src_caches) == len(dst_caches), f"{len(src_caches)} caches to copy to {len(dst_caches)}"
    groups: dict[int, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for source, destination in zip(src_caches, dst_caches, strict=True):
        block_bytes = _block_bytes(source)
        assert is_contiguous(source), "a source with gaps"
        assert is_contiguous(destination), "a destination with gaps"
        assert _block_bytes(destination) == block_bytes, "blocks of a pair that differ in size"
        sources, destinations = groups[block_bytes]
        sources.append(source)
        destinations.append(destination)
    for block_bytes, pair in groups.items():
        yield block_bytes, *pair


def _block_bytes(cache: Tensor) -> int:
    return cache.nbytes // len(cache) if len(cache) else 0
