"""A GPU's memory, and the host's next to it: what a step takes up with it, and what the caches lie in.

On a CPU all of this is nothing: tensors are where they have to be.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate

import torch
from torch import Tensor

from quire.model.batch import ForwardBatch
from quire.model.kv_cache import ALIGNMENT


def device_allocator(device: torch.device) -> Callable[[int], Tensor] | None:
    """Return what gives zeros on a device, uint8 [num_bytes]; None for the host's, where `KVCache` has its own way."""
    if device.type == "cpu":
        return None
    return lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8, device=device)


class PinnedMemory:
    """Zeros in host memory that a GPU reads and writes by itself, for tensors of one size.

    PyTorch rounds each pinned allocation up to a power of two: up to twice the memory, tensor by tensor. So as many
    tensors as fill a power of two share an allocation, and what is left unused is less than a tensor of each.
    """

    def __init__(self, num_tensors: int) -> None:
        self._num_left = num_tensors
        self._slab = torch.empty(0, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> Tensor:
        """Return the memory of the next tensor, uint8 [num_bytes]."""
        padded_bytes = num_bytes + -num_bytes % ALIGNMENT
        if len(self._slab) < padded_bytes:
            count = _tensors_per_slab(self._num_left, padded_bytes)
            self._slab = torch.zeros(count * padded_bytes, dtype=torch.uint8, pin_memory=True)
        taken, self._slab = self._slab[:num_bytes], self._slab[padded_bytes:]
        self._num_left -= 1
        return taken


def pinned_bytes(num_tensors: int, num_bytes: int) -> int:
    """Return what `PinnedMemory` takes for so many tensors, with what PyTorch adds."""
    num_bytes += -num_bytes % ALIGNMENT
    total_bytes = 0
    while num_tensors > 0:
        count = _tensors_per_slab(num_tensors, num_bytes)
        total_bytes += 1 << (count * num_bytes - 1).bit_length()
        num_tensors -= count
    return total_bytes


def _tensors_per_slab(num_tensors: int, num_bytes: int) -> int:
    """Return how many tensors fill the largest power of two that all of them do not fit under; at least one."""
    return max(1, (1 << (num_tensors * num_bytes).bit_length() - 1) // num_bytes)


def empty_host_cache() -> None:
    """Give the pinned memory that PyTorch keeps for reuse back to the system."""
    if hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()
        return
    torch._C._host_emptyCache()  # of torch 2.11


def use_exact_products() -> None:
    """Let a GPU multiply float32 as float32 and sum 16-bit products in float32, whatever the environment has set.

    NVIDIA's images allow TF32 by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, and PyTorch by default sums parts of a split 16-bit
    product in 16 bits: both are beyond the errors that `docs/gpu.md` states.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def upload_step(
    forward: ForwardBatch, logit_rows: Tensor, sample_rows: Tensor, device: torch.device
) -> tuple[ForwardBatch, Tensor, Tensor]:
    """Copy a step's inputs from the host's memory to `device` in one transfer, from one pinned buffer, without waiting.

    torch keeps the buffer from being handed out again before the transfer is over.
    """
    tensors = [*forward.tensors, logit_rows, sample_rows]
    stops = list(accumulate(tensor.nbytes + -tensor.nbytes % ALIGNMENT for tensor in tensors))
    buffer = torch.empty(stops[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")

    def places(memory: Tensor) -> Iterator[Tensor]:
        for start, tensor in zip([0, *stops], tensors, strict=False):
            yield memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    for place, tensor in zip(places(buffer), tensors, strict=True):
        place.copy_(tensor)
    *fields, logit_rows, sample_rows = places(buffer.to(device, non_blocking=True))
    return ForwardBatch(*fields), logit_rows, sample_rows
