"""Block copies within the cache, or between it and the swap space: all copies of a step at once, in every layer."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.reference.kv_quantization import as_bytes


def copy_blocks(
    src_caches: list[Tensor], dst_caches: list[Tensor], src: NDArray[np.int64], dst: NDArray[np.int64]
) -> None:
    """Copy block src[i] of each source cache over block dst[i] of the destination at its place in the list, as if all
    were read before anything is written. Kwon et al. 2023, sections 4.5 and 5.1.

    Caches [num_blocks, ...]: the same ones twice, or the pool's and the swap space's in either direction, which share
    no memory and have blocks of the same shape at each place. src and dst [num_copies] int64, no
    destination twice.
    """
    for source, destination in zip(src_caches, dst_caches, strict=True):
        as_bytes(destination)[dst] = as_bytes(source)[src]
