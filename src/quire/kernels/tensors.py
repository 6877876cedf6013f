"""Tensors of a back end, arrays of NumPy or tensors of PyTorch, and what code that serves both does with them.

NumPy computes with none of the dtypes that it lacks: these functions go by way of float32, and round once.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core import arrays
from quire.core.arrays import FLOAT32, MODEL_DTYPES, Array
from quire.kernels.conversion import converted
from quire.kernels.linear_weight import LinearWeight, StoredTable

Tensor = Any  # an Array, or a torch.Tensor where the back end is PyTorch's or a GPU's
DType = Any   # as the tensor has it


class Library(Protocol):
    """The library of a back end's tensors."""

    def dtype(self, name: str) -> DType:
        """Return a dtype by its name: float32, bfloat16, int8, float8_e4m3fn."""

    def device(self, name: object) -> Any:  # noqa: ANN401 (str, or torch.device)
        """Return a device by its name."""

    def tensor(self, array: Array, device: object = "cpu") -> Tensor:
        """Return an array as a tensor, on the CPU of the same memory, which must be writable."""

    def weight(self, weight: LinearWeight, device: object) -> LinearWeight:
        """Return a weight of arrays as one of tensors."""

    def table(self, table: StoredTable) -> Any:  # noqa: ANN401 (a StoredTable of tensors)
        """Return a stored table as one that takes and returns tensors."""


class NumpyLibrary:
    """The `Library` of back ends of CPUs."""

    def dtype(self, name: str) -> arrays.DType:
        """Return a dtype by its name."""
        return _DTYPES[name]

    def device(self, name: object) -> str:
        """Return the CPU, of which there is one."""
        assert str(name) == "cpu", f"arrays on {name}"
        return "cpu"

    def tensor(self, array: Array, device: object = "cpu") -> Array:
        """Return the array itself."""
        return array

    def weight(self, weight: LinearWeight, device: object) -> LinearWeight:
        """Return the weight itself."""
        return weight

    def table(self, table: StoredTable) -> StoredTable:
        """Return the table itself."""
        return table


_DTYPES = {**MODEL_DTYPES, "int8": np.dtype(np.int8), "float8_e4m3fn": arrays.FLOAT8_E4M3}
NUMPY_LIBRARY = NumpyLibrary()


def is_contiguous(x: Tensor) -> bool:
    """Return whether the elements stand together, in the order of their indices."""
    return bool(x.flags.c_contiguous if isinstance(x, np.ndarray) else x.is_contiguous())


def contiguous(x: Tensor) -> Tensor:
    """Return x, in memory of its own if it has gaps."""
    return np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x.contiguous()


def full(shape: tuple[int, ...], value: float, other: Tensor) -> Tensor:
    """Return float32 [shape] of one value where `other` is."""
    filled = np.full(shape, value, np.float32)
    return filled if isinstance(other, np.ndarray) else other.float().new_tensor(filled)


def empty_like(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return memory for a tensor of another shape where x is, in its dtype."""
    return np.empty(shape, x.dtype) if isinstance(x, np.ndarray) else x.new_empty(shape)


def take_rows(x: Tensor, rows: Any) -> Tensor:  # noqa: ANN401 (int64 [num_rows], where x is)
    """Return rows of x [any, ...] in memory of their own."""
    return x.take(rows, axis=0) if isinstance(x, np.ndarray) else x[rows]


def concatenated_rows(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of tensors, one after the other, in memory of their own."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    joined, first = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:]), 0
    for part in parts:
        joined[first : first + len(part)] = part
        first += len(part)
    return joined


def concatenated_columns(parts: Sequence[Tensor]) -> Tensor:
    """Return the columns of tensors [num_rows, any], side by side, in memory of their own."""
    joined, first = empty_like(parts[0], (len(parts[0]), sum(part.shape[1] for part in parts))), 0
    for part in parts:
        joined[:, first : first + part.shape[1]] = part
        first += part.shape[1]
    return joined


def floats(x: Tensor) -> NDArray[np.float32]:
    """Return the values of x in float32, in host memory."""
    if isinstance(x, np.ndarray):
        return converted(x, FLOAT32)
    found: NDArray[np.float32] = x.float().numpy(force=True)
    return found


def like(values: NDArray[np.float32], other: Tensor) -> Tensor:
    """Return float32 values as a tensor where `other` is, in its dtype."""
    return converted(values, other.dtype) if isinstance(other, np.ndarray) else other.new_tensor(values)


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return x times a factor, which is rounded to float32."""
    return converted(floats(x) * np.float32(factor), x.dtype) if isinstance(x, np.ndarray) else x * factor


def divided(x: Tensor, divisor: float) -> Tensor:
    """Return float32 x over a divisor, which is rounded to float32."""
    return x / np.float32(divisor) if isinstance(x, np.ndarray) else x / divisor


def added(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y, of one dtype."""
    return converted(floats(x) + floats(y), x.dtype) if isinstance(x, np.ndarray) else x + y


def clipped(x: Tensor, limit: float) -> Tensor:
    """Return x with elements bounded by [-limit, limit], in its dtype; NaN stays."""
    return converted(floats(x).clip(-limit, limit), x.dtype) if isinstance(x, np.ndarray) else x.clamp(-limit, limit)


def tanh(x: Tensor) -> Tensor:
    """Return tanh of each element, of an array in float64 and rounded: the same on all machines."""
    if not isinstance(x, np.ndarray):
        return x.tanh()
    return converted(np.tanh(floats(x).astype(np.float64)).astype(np.float32), x.dtype)


def exp(x: Tensor) -> Tensor:
    """Return exp of each element, of an array in float64 and rounded: the same on all machines."""
    return converted(np.exp(x.astype(np.float64)).astype(np.float32), x.dtype) if isinstance(x, np.ndarray) else x.exp()


def multiplied(x: Tensor, factors: Tensor) -> Tensor:
    """Return x times factors, which are rounded to its dtype, of a shape that fits x."""
    if isinstance(x, np.ndarray):
        return converted(floats(x) * floats(converted(factors, x.dtype)), x.dtype)
    return x * factors.to(x.dtype)


def clear_rows(x: Tensor, rows: NDArray[np.int64]) -> None:
    """Write zeros to rows of x [any, ...]."""
    if isinstance(x, np.ndarray):
        arrays.bits(x)[rows] = 0
    else:
        x[rows] = x.new_zeros(())
