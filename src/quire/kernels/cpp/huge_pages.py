"""Memory on huge pages, where the system has them: on a busy day weights on small pages are read at half the speed.

Private, for what is shared between processes gets huge pages only where an administrator has asked for them.
"""

import mmap

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
READ_AHEAD_BYTES = 32 << 10  # prefetches reach behind the last weight
ALIGNMENT = 64               # bytes: a cache line
MAPPED_AT_ONCE = 64 << 20    # bytes; none is used before it is written to


def huge_pages(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Return memory of its own, on huge pages from its first byte on; all zeros, taken where it is written to."""
    num_bytes = num_elements * dtype.itemsize
    num_pages = (num_bytes + READ_AHEAD_BYTES) // HUGE_PAGE_BYTES + 2  # one for the rest, one to align
    memory = mmap.mmap(-1, num_pages * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skipped = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[skipped : skipped + num_bytes].view(dtype)


class PackedMemory:
    """Memory of packed weights, one after the other, so that small ones share a huge page too.

    A mapping is returned to the system when the last weight in it is freed.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return memory for a packed weight, [num_elements]."""
        num_bytes = num_elements * dtype.itemsize
        if num_bytes > len(self._free):
            self._free = huge_pages(max(num_bytes, MAPPED_AT_ONCE), torch.uint8)
        taken, self._free = self._free[:num_bytes], self._free[num_bytes + -num_bytes % ALIGNMENT :]
        return taken.view(dtype)
