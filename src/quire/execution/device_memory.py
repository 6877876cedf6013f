"""A GPU's memory, and the host's next to it: what a step takes up with it, and what the caches lie in.

On a CPU all of this is nothing: tensors are where they have to be.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate

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
