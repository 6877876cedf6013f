"""Upload of small host arrays to the device of a step, without waiting for what the device computes."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on `device`: by way of pinned memory, or where it is if that is the CPU.

    PyTorch does not reuse the pinned memory before the transfer has ended.
    """
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)
