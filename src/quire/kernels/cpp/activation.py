"""Gated activations in C++; the meaning is `quire.kernels.activation`'s."""

import torch
from torch import Tensor

from quire.kernels.cpp.dtypes import kernel_dtype, pair

_KERNELS = pair("silu_and_mul")


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up for gate_up [num_rows, 2 * width], gate in the first half of each row."""
    dtype = kernel_dtype(gate_up.dtype)
    given = gate_up.to(dtype).contiguous()
    num_rows, width = given.shape[0], given.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=dtype)
    _KERNELS[dtype](given.data_ptr(), out.data_ptr(), num_rows, width)
    return out.to(gate_up.dtype)
