"""Copying blocks within the cache, or between it and the swap space, in Triton: all copies, all layers, one launch.

The kernel is handed the addresses of the tensors, so it does not matter how many there are; and pinned host memory has
addresses that the device can follow, so a swap is one launch, too, where a call of the driver for each layer and block
would take longer than the bytes. A program moves up to 16 KiB, 16 bytes to a thread at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import block_copy as plain

WORDS = 2048  # of 8 bytes, that a program moves


def copy_blocks(caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy what `block_copy.reference` copies; src and dst in host memory.

    Where a block is both read and written, which no plan asks for, it is read first at the price of a second copy.
    """
    if set(src.tolist()) & set(dst.tolist()):
        plain.copy_blocks(caches, src.to(caches[0].device), dst.to(caches[0].device))
        return
    _move(caches, caches, src, dst, caches[0].device)


def swap_blocks(src_caches: list[Tensor], dst_caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy what `block_copy.swap_blocks` copies; src and dst, and one side's caches, pinned, in host memory."""
    device = src_caches[0].device if src_caches[0].is_cuda else dst_caches[0].device
    _move(src_caches, dst_caches, src, dst, device)


def _move(sources: list[Tensor], targets: list[Tensor], src: Tensor, dst: Tensor, device: torch.device) -> None:
    if not len(src):
        return
    block_bytes = sources[0].stride(0) * sources[0].itemsize
    assert block_bytes % 8 == 0, f"blocks of {block_bytes} bytes"
    assert len(sources) == len(targets)
    assert all(x.is_contiguous() and x.stride(0) * x.itemsize == block_bytes for x in sources + targets)
    assert src.dtype == dst.dtype == torch.int64
    addresses = torch.tensor([[x.data_ptr() for x in tensors] for tensors in (sources, targets)])
    table = torch.cat([addresses.flatten(), src, dst])  # int64: all that the kernel has to know, in one upload
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    num_words = block_bytes // 8
    grid = (len(src), len(sources), triton.cdiv(num_words, WORDS))
    _move_kernel[grid](table, len(sources), len(src), num_words, WORDS=WORDS, num_warps=4)


@triton.jit(do_not_specialize=("num_copies",))
def _move_kernel(table, num_caches, num_copies, num_words, WORDS: tl.constexpr):
    """A part of one block of one cache. `table`: addresses of the sources, of the targets; blocks read, written."""
    copy, cache = tl.program_id(0), tl.program_id(1)
    words = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    source = tl.load(table + cache).to(tl.pointer_type(tl.int64))
    target = tl.load(table + num_caches + cache).to(tl.pointer_type(tl.int64))
    src = tl.load(table + 2 * num_caches + copy)
    dst = tl.load(table + 2 * num_caches + num_copies + copy)
    content = tl.load(source + src * num_words + words, mask=words < num_words)
    tl.store(target + dst * num_words + words, content, mask=words < num_words)
