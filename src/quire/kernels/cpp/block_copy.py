"""Copying blocks within the cache, or between it and the swap space, in C++: all copies, all layers, one call."""

import torch
from torch import Tensor

from quire.kernels import block_copy as plain
from quire.kernels.cpp import _kernels


def copy_blocks(src_caches: list[Tensor], dst_caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy what `block_copy.copy_blocks` copies. A block is one run of bytes, in memory or mapped from a file."""
    assert len(src_caches) == len(dst_caches)
    assert len(src) == len(dst)
    assert src.dtype == dst.dtype == torch.int64
    if not src_caches or not len(src):
        return
    block_bytes = src_caches[0].stride(0) * src_caches[0].itemsize
    caches = (*src_caches, *dst_caches)
    assert all(x.is_contiguous() and x.stride(0) * x.itemsize == block_bytes for x in caches), "caches that differ"
    sources, destinations = ([cache.data_ptr() for cache in pool] for pool in (src_caches, dst_caches))
    if sources == destinations and set(src.tolist()) & set(dst.tolist()):  # which no plan asks for
        plain.copy_blocks(src_caches, dst_caches, src, dst)
        return
    assert sources == destinations or not set(sources) & set(destinations), "pools that share memory"
    src, dst = src.contiguous(), dst.contiguous()
    _kernels.swap_blocks(sources, destinations, block_bytes, src.data_ptr(), dst.data_ptr(), len(src))
