"""Groups of caches for block copies: a copy kernel serves blocks of one size."""


from collections import defaultdict
from collections.abc import Iterator

from torch import Tensor


def by_block_bytes(
    src_caches: list[Tensor], dst_caches: list[Tensor]
) -> Iterator[tuple[int, list[Tensor], list[Tensor]]]:
    """Yield the bytes of a block, and the pairs of caches that have such blocks: layers and models may differ.

    Caches are contiguous, and those of a pair have blocks of one size.
    """
    assert len(src_caches) == len(dst_caches), f"{len(src_caches)} caches to copy to {len(dst_caches)}"
    groups: dict[int, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for source, destination in zip(src_caches, dst_caches, strict=True):
        block_bytes = source.stride(0) * source.itemsize
        assert source.is_contiguous(), "a source with gaps"
        assert destination.is_contiguous(), "a destination with gaps"
        assert destination.stride(0) * destination.itemsize == block_bytes, "blocks of a pair that differ in size"
        sources, destinations = groups[block_bytes]
        sources.append(source)
        destinations.append(destination)
    for block_bytes, pair in groups.items():
        yield block_bytes, *pair
