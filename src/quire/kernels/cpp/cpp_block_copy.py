"""Block copies within the cache, or between it and the swap space, in C++: all layers of one block size in a call."""

import torch
from torch import Tensor

from quire.kernels.block_copy import by_block_bytes
from quire.kernels.cpp import _kernels
from quire.kernels.reference import block_copy as plain


def copy_blocks(src_caches: list[Tensor], dst_caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy what `block_copy.copy_blocks` copies. A block is one run of bytes, in memory or mapped from a file."""
    assert len(src) == len(dst)
    assert src.dtype == dst.dtype == torch.int64
    if not src_caches or not len(src):
        return
    src, dst = src.contiguous(), dst.contiguous()
    for block_bytes, own_sources, own_targets in by_block_bytes(src_caches, dst_caches):
        sources, destinations = ([cache.data_ptr() for cache in pool] for pool in (own_sources, own_targets))
        if sources == destinations and set(src.tolist()) & set(dst.tolist()):  # no plan asks for it
            plain.copy_blocks(own_sources, own_targets, src, dst)
            continue
        assert sources == destinations or not set(sources) & set(destinations), "pools that share memory"
        _kernels.swap_blocks(sources, destinations, block_bytes, src.data_ptr(), dst.data_ptr(), len(src))
