"""Kernels by dtype: bfloat16 has its own, every other dtype is computed in float32."""

from collections.abc import Callable
from typing import Any

import numpy as np

from quire.core.arrays import BFLOAT16, FLOAT32, Array, DType
from quire.extension import _kernels


def pair(name: str) -> dict[DType, Callable[..., Any]]:
    """Return the two kernels of an op by the dtype of their arrays."""
    return {BFLOAT16: getattr(_kernels, f"{name}_bf16"), FLOAT32: getattr(_kernels, f"{name}_float")}


def kernel_dtype(dtype: DType) -> DType:
    """Return the dtype in which arrays of `dtype` go through a kernel."""
    return BFLOAT16 if dtype == BFLOAT16 else FLOAT32


def address(array: Array | None) -> int:
    """Return where an array's elements begin; 0 for none."""
    return 0 if array is None else _kernels.address(array)


def row_stride(array: Array) -> int:
    """Return the elements from the beginning of a row to that of the next one."""
    return array.strides[0] // array.itemsize


def is_in_rows(array: Array) -> bool:
    """Return whether the elements of each row stand together: [num_rows, width]."""
    return array.strides[-1] == array.itemsize or not array.size


def in_heads(x: Array) -> Array:
    """Return [num_tokens, num_heads, head_dim] with a token's heads end to end."""
    _, head_stride, stride = x.strides
    has_gaps = stride != x.itemsize or head_stride != x.shape[2] * x.itemsize
    return np.ascontiguousarray(x) if has_gaps else x
