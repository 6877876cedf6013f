"""Block copies within the cache, or between it and the swap space: all copies of a step at once, in every layer."""

from collections import defaultdict
from collections.abc import Iterator

from torch import Tensor

from quire.kernels.kv_quantization import as_bytes


def copy_blocks(src_caches: list[Tensor], dst_caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy block src[i] of each source cache over block dst[i] of the destination at its place in the list, as if all
    were read before anything is written. Kwon et al. 2023, sections 4.5 and 5.1.

    Caches [num_blocks, ...]: the same ones twice, or the pool's and the swap space's in either direction, which share
    no memory and have blocks of the same shape at each place. src and dst [num_copies] int64 in host memory, no
    destination twice.
    """
    for source, destination in zip(src_caches, dst_caches, strict=True):
        as_bytes(destination).index_copy_(0, dst, as_bytes(source).index_select(0, src))


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
