"""Groups of caches for block copies: a copy kernel serves blocks of one size."""

from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from quire.kernels.tensors import Tensor, is_contiguous

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
