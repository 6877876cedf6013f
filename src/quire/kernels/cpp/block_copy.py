"""Copying blocks within the cache in C++: all copies of a step, all layers, one call."""

import torch
from torch import Tensor

from quire.kernels.cpp import _kernels


def copy_blocks(caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy what `block_copy.reference` copies. Caches of any dtype and layout, a block being one run of bytes."""
    if not caches or not len(src):
        return
    block_bytes = caches[0].stride(0) * caches[0].itemsize
    assert all(x.is_contiguous() and x.stride(0) * x.itemsize == block_bytes for x in caches), "caches that differ"
    assert len(src) == len(dst)
    assert src.dtype == dst.dtype == torch.int64
    src, dst = src.contiguous(), dst.contiguous()
    _kernels.copy_blocks([x.data_ptr() for x in caches], block_bytes, src.data_ptr(), dst.data_ptr(), len(src))
