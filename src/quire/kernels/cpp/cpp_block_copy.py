"""Block copies within the cache, or between it and the swap space, in C++: all layers of one block size in a call."""

import numpy as np
from numpy.typing import NDArray

from quire.core.arrays import Array
from quire.kernels.block_copy import by_block_bytes
from quire.kernels.cpp import _kernels


def copy_blocks(
    src_caches: list[Array], dst_caches: list[Array], src: NDArray[np.int64], dst: NDArray[np.int64]
) -> None:
    """Copy what `reference.block_copy` copies. A block is one run of bytes, in memory or mapped from a file."""
    assert len(src) == len(dst)
    assert src.dtype == dst.dtype == np.int64
    if not src_caches or not len(src):
        return
    src, dst = np.ascontiguousarray(src), np.ascontiguousarray(dst)
    for block_bytes, own_sources, own_targets in by_block_bytes(src_caches, dst_caches):
        sources, destinations = (list(map(_kernels.address, pool)) for pool in (own_sources, own_targets))
        if sources == destinations and set(src.tolist()) & set(dst.tolist()):  # no plan asks for it
            for source, target in zip(own_sources, own_targets, strict=True):
                target[dst] = source[src]
            continue
        assert sources == destinations or not set(sources) & set(destinations), "pools that share memory"
        _kernels.swap_blocks(sources, destinations, block_bytes, _kernels.address(src), _kernels.address(dst), len(src))
