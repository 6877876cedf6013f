"""Copy blocks within the cache, or between it and the swap space: all copies of a step at once, in every layer.

Kwon et al. 2023, sections 4.5 and 5.1.
"""

from torch import Tensor


def reference(caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy block src[i] over block dst[i] in each cache, as if all sources were read before anything is written.

    caches: any number of [num_blocks, ...] tensors; src and dst [num_copies] int64, no destination twice.
    """
    for cache in caches:
        blocks = [cache[block].clone() for block in src.tolist()]
        for block, content in zip(dst.tolist(), blocks, strict=True):
            cache[block] = content


def copy_blocks(caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy what `reference` copies, one gather and one scatter per cache."""
    for cache in caches:
        cache.index_copy_(0, dst, cache.index_select(0, src))


def swap_blocks(src_caches: list[Tensor], dst_caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy block src[i] of each source cache over block dst[i] of the destination at its place in the list.

    Caches [num_blocks, ...], the numbers of blocks apart alike, that share no memory: the pool's and the swap space's,
    in either direction. src and dst [num_copies] int64, no destination twice.
    """
    for source, destination in zip(src_caches, dst_caches, strict=True):
        destination.index_copy_(0, dst, source.index_select(0, src))
