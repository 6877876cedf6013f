"""Kernels by dtype: bfloat16 has its own, every other dtype is computed in float32."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.kernels.cpp import _kernels

Kernel = Callable[..., Any]


def pair(name: str) -> dict[torch.dtype, Kernel]:
    """Return the two kernels of an op by the dtype of their tensors."""
    return {torch.bfloat16: getattr(_kernels, f"{name}_bf16"), torch.float32: getattr(_kernels, f"{name}_float")}


def kernel_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of `dtype` go through a kernel."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def address(tensor: Tensor | None) -> int:
    """Return where a tensor's elements begin; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()
