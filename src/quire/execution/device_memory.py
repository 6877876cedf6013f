"""A GPU's memory, and the host's next to it: what a step takes up with it, and what the caches lie in.

On a CPU all of this is nothing: tensors are where they have to be.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.model.batch import ForwardBatch
from quire.model.kv_cache import ALIGNMENT


def memory_of(device: torch.device) -> Callable[[int], Tensor] | None:
    """Return what gives zeros on a device, uint8 [num_bytes]; None for the host's, where `KVCache` has its own way."""
    if device.type == "cpu":
        return None
    return lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def pinned(num_bytes: int) -> Tensor:
    """Return zeros in host memory that a GPU reads and writes by itself, uint8 [num_bytes]."""
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)


def upload(tensors: Sequence[Tensor], device: torch.device, *, pins: bool = True) -> list[Tensor]:
    """Copy tensors from the host's memory to `device` in one transfer, from one pinned buffer, without waiting for it.

    torch keeps the buffer from being handed out again before the transfer is over. `pins` is for tests without a GPU.
    """
    starts, stop = [], 0
    for tensor in tensors:
        starts.append(stop)
        stop += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    buffer = torch.empty(stop, dtype=torch.uint8, pin_memory=pins)
    for start, tensor in zip(starts, tensors, strict=True):
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    there = buffer.to(device, non_blocking=True)
    return [
        there[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]


def upload_step(
    forward: ForwardBatch, logit_rows: Tensor, sample_rows: Tensor, device: torch.device
) -> tuple[ForwardBatch, Tensor, Tensor]:
    """Return a step's inputs on `device`; as they are for a CPU."""
    if device.type == "cpu":
        return forward, logit_rows, sample_rows
    *fields, logit_rows, sample_rows = upload([*forward.tensors, logit_rows, sample_rows], device)
    return ForwardBatch(*fields), logit_rows, sample_rows
