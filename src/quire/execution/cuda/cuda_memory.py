"""Memory of a GPU and pinned memory of its host, for caches."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.model.kv_cache import ALIGNMENT


def device_allocator(device: torch.device) -> Callable[[int], Tensor]:
    """Return an allocator of zeros on a device, uint8 [num_bytes]."""
    return lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8, device=device)


class PinnedMemory:
    """Zeros in pinned host memory, which a GPU reads and writes itself, for tensors of given sizes in bytes.

    PyTorch rounds each pinned allocation up to a power of two: up to twice the memory, tensor by tensor. So as many
    tensors as fill a power of two share an allocation (a slab), and what is left unused is less than a tensor of each.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._slab_sizes = deque(_slab_sizes(sizes))
        self._slab = torch.empty(0, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> Tensor:
        """Return the memory of the next tensor, uint8 [num_bytes]; tensors come in the order of the sizes."""
        padded_bytes = _padded(num_bytes)
        if len(self._slab) < padded_bytes:
            self._slab = torch.zeros(self._slab_sizes.popleft(), dtype=torch.uint8, pin_memory=True)
        allocated, self._slab = self._slab[:num_bytes], self._slab[padded_bytes:]
        return allocated


def pinned_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes that `PinnedMemory` allocates for tensors of these sizes, PyTorch's rounding included."""
    return sum(1 << (slab_bytes - 1).bit_length() for slab_bytes in _slab_sizes(sizes) if slab_bytes)


def _slab_sizes(sizes: Sequence[int]) -> list[int]:
    """Cut tensors, in order, into slabs: each is filled up to the largest power of two below all that remains."""
    padded = deque(map(_padded, sizes))
    remaining_bytes, slabs = sum(padded), list[int]()
    while padded:
        limit, slab_bytes = 1 << max(0, remaining_bytes.bit_length() - 1), padded.popleft()
        while padded and slab_bytes + padded[0] <= limit:
            slab_bytes += padded.popleft()
        remaining_bytes -= slab_bytes
        slabs.append(slab_bytes)
    return slabs


def _padded(num_bytes: int) -> int:
    return num_bytes + -num_bytes % ALIGNMENT


def empty_host_cache() -> None:
    """Give the pinned memory that PyTorch keeps for reuse back to the system."""
    if hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()
        return
    torch._C._host_emptyCache()  # torch 2.11 has no public name for it


def use_exact_products() -> None:
    """Let a GPU multiply float32 as float32 and sum 16-bit products in float32, whatever the environment has set.

    NVIDIA's images allow TF32 by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, and PyTorch by default sums parts of a split 16-bit
    product in 16 bits: both are beyond the errors that `docs/gpu.md` states.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
