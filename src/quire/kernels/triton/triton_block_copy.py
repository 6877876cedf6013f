"""Block copies within the cache, or between it and the swap space, in Triton: one launch per block size.

The kernel is handed the addresses of the tensors, so it does not matter how many there are; and pinned host memory has
addresses that the device can follow, so a swap is one launch, too, where a call of the driver for each layer and block
would take longer than the bytes. A program moves 16 KiB at a time, 16 bytes to a thread. Few programs swap, so that the
processors are free for what is computed meanwhile: 512 KiB on their way are more than a bus of 64 GB/s holds.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.kv_cache import by_block_bytes
from quire.kernels.reference import kv_cache as plain

WORDS = 2048         # words of 8 bytes that a program moves at a time
COPY_PROGRAMS = 4096  # more would wait for these
SWAP_PROGRAMS = 32


def copy_blocks(sources: list[Tensor], targets: list[Tensor], src: NDArray[np.int64], dst: NDArray[np.int64]) -> None:
    """Copy what `block_copy.copy_blocks` copies; of two pools, one may be pinned host memory.

    Where a block is both read and written, which no plan asks for, it is read first at the price of a second copy.
    """
    if not len(src):
        return
    device = sources[0].device if sources[0].is_cuda else targets[0].device
    is_swap = sources[0].data_ptr() != targets[0].data_ptr()
    if not is_swap and set(src.tolist()) & set(dst.tolist()):
        plain.copy_blocks(sources, targets, src, dst)
        return
    assert src.dtype == dst.dtype == np.int64
    for block_bytes, own_sources, own_targets in by_block_bytes(sources, targets):
        _launch(own_sources, own_targets, src, dst, block_bytes, device, is_swap=is_swap)


def _launch(
    sources: list[Tensor],
    targets: list[Tensor],
    src: NDArray[np.int64],
    dst: NDArray[np.int64],
    block_bytes: int,
    device: torch.device,
    *,
    is_swap: bool,
) -> None:
    assert block_bytes % 8 == 0, f"blocks of {block_bytes} bytes"
    assert all(x.data_ptr() % 16 == 0 for x in sources + targets), "the kernel moves 16 bytes at a time"
    addresses = torch.tensor([[x.data_ptr() for x in tensors] for tensors in (sources, targets)])
    places = torch.from_numpy(np.concatenate([src, dst]))
    table = torch.cat([addresses.flatten(), places])  # int64: all that the kernel has to know, in one upload
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    num_words = block_bytes // 8
    num_parts = len(src) * len(sources) * triton.cdiv(num_words, WORDS)
    grid = (min(num_parts, SWAP_PROGRAMS if is_swap else COPY_PROGRAMS),)
    _move_kernel[grid](table, len(sources), len(src), num_words, num_parts, WORDS=WORDS, num_warps=4)


@triton.jit(do_not_specialize=("num_copies", "num_parts"))
def _move_kernel(table, num_caches, num_copies, num_words, num_parts, WORDS: tl.constexpr):
    """Every `num_programs`-th part of a block of a cache. `table`: addresses to read, to write; blocks likewise."""
    for part in range(tl.program_id(0), num_parts, tl.num_programs(0)):
        words = part % tl.cdiv(num_words, WORDS) * WORDS + tl.arange(0, WORDS)
        block = part // tl.cdiv(num_words, WORDS)
        cache, copy = block % num_caches, block // num_caches
        source = tl.multiple_of(tl.load(table + cache).to(tl.pointer_type(tl.int64)), 16)
        target = tl.multiple_of(tl.load(table + num_caches + cache).to(tl.pointer_type(tl.int64)), 16)
        src = tl.load(table + 2 * num_caches + copy)
        dst = tl.load(table + 2 * num_caches + num_copies + copy)
        content = tl.load(source + src * num_words + words, mask=words < num_words)
        tl.store(target + dst * num_words + words, content, mask=words < num_words)
