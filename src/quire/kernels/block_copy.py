"""Copy blocks within the cache: all copies of a step at once, in every layer (Kwon et al. 2023, section 5.1)."""

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
