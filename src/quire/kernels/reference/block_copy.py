"""Block copies within the cache, or between it and the swap space: all copies of a step at once, in every layer."""


from torch import Tensor

from quire.kernels.reference.kv_quantization import as_bytes


def copy_blocks(src_caches: list[Tensor], dst_caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy block src[i] of each source cache over block dst[i] of the destination at its place in the list, as if all
    were read before anything is written. Kwon et al. 2023, sections 4.5 and 5.1.

    Caches [num_blocks, ...]: the same ones twice, or the pool's and the swap space's in either direction, which share
    no memory and have blocks of the same shape at each place. src and dst [num_copies] int64 in host memory, no
    destination twice.
    """
    for source, destination in zip(src_caches, dst_caches, strict=True):
        as_bytes(destination).index_copy_(0, dst, as_bytes(source).index_select(0, src))
