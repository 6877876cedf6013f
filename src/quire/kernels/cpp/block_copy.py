"""Copying blocks within the cache, or between it and the swap space, in C++: all copies, all layers, one call."""

import torch
from torch import Tensor

from quire.kernels.cpp import _kernels


def copy_blocks(caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy what `block_copy.reference` copies. Caches of any dtype and layout, a block being one run of bytes."""
    if not caches or not len(src):
        return
    block_bytes = _block_bytes(caches)
    src, dst = _ids(src, dst)
    _kernels.copy_blocks(_addresses(caches), block_bytes, src.data_ptr(), dst.data_ptr(), len(src))


def swap_blocks(src_caches: list[Tensor], dst_caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy what `block_copy.swap_blocks` copies. Caches as for `copy_blocks`, in memory or mapped from a file."""
    assert len(src_caches) == len(dst_caches)
    if not src_caches or not len(src):
        return
    block_bytes = _block_bytes([*src_caches, *dst_caches])
    src, dst = _ids(src, dst)
    sources, destinations = _addresses(src_caches), _addresses(dst_caches)
    assert not set(sources) & set(destinations), "pools that share memory"
    _kernels.swap_blocks(sources, destinations, block_bytes, src.data_ptr(), dst.data_ptr(), len(src))


def _block_bytes(caches: list[Tensor]) -> int:
    block_bytes = caches[0].stride(0) * caches[0].itemsize
    assert all(x.is_contiguous() and x.stride(0) * x.itemsize == block_bytes for x in caches), "caches that differ"
    return block_bytes


def _ids(src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
    assert len(src) == len(dst)
    assert src.dtype == dst.dtype == torch.int64
    return src.contiguous(), dst.contiguous()


def _addresses(caches: list[Tensor]) -> list[int]:
    return [x.data_ptr() for x in caches]
