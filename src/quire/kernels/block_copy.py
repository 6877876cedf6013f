"""Copy blocks within the cache: all copies of a step at once, in every layer (Kwon et al. 2023, section 5.1)."""

from torch import Tensor


def copy_blocks(caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy block src[i] over block dst[i] in each cache.

    caches: any number of [num_blocks, ...] tensors; src and dst [num_copies] int64. Every source is read before
    anything is written; no destination appears twice.
    """
    for cache in caches:
        cache.index_copy_(0, dst, cache.index_select(0, src))
