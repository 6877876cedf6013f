"""Checkpoint protocol: tensors by name, with shapes and dtypes that are known before any of them is read.

Rows are read in ranges, so that a rank of tensor parallelism reads its own only.
"""

from collections.abc import Collection
from typing import Protocol

from torch import Tensor

from quire.core.errors import ModelError

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # by safetensors' names


class Checkpoint(Protocol):
    """Source of a model's tensors. A method that fails raises ModelError with the place of the tensor."""

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""

    def location(self, name: str | None = None) -> str:
        """Return the file of tensor `name`, or without one the whole checkpoint's place, for error messages."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which must be here."""

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor, by safetensors' names: BF16, F32, I8."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a tensor as stored, on the CPU, perhaps in the file's memory: copy it soon.

        A tensor without dimensions has one row.
        """


def read_rows(
    checkpoint: Checkpoint,
    name: str,
    shape: tuple[int, ...],
    rows: tuple[int, int] | None = None,
    dtypes: Collection[str] = FLOAT_DTYPES,
) -> Tensor:
    """Return rows [start, stop) of a tensor of a known shape, or all of them.

    Raises ModelError, before anything is read, if the tensor is missing or has another shape or none of the dtypes.
    """
    require_tensor(checkpoint, name, shape, dtypes)
    return checkpoint.read(name, *(rows or (0, shape[0] if shape else 1)))


def require_tensor(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtypes: Collection[str] = FLOAT_DTYPES
) -> None:
    """Raise ModelError if a tensor is missing or has another shape or none of the dtypes."""
    if name not in checkpoint.names:
        raise ModelError(f"{checkpoint.location()}: tensor {name} is missing; expected shape {list(shape)}")
    found, dtype = checkpoint.shape(name), checkpoint.dtype(name)
    if found != shape:
        raise ModelError(
            f"{checkpoint.location(name)}: tensor {name} has shape {list(found)}, expected {list(shape)}"
        )
    if dtype not in dtypes:
        raise ModelError(
            f"{checkpoint.location(name)}: tensor {name} has dtype {dtype}, expected one of {', '.join(dtypes)}"
            + ("; quantized weights need a quantization_config" if dtypes == FLOAT_DTYPES else "")
        )
