"""A checkpoint in memory: tensors by name, and a record of the rows that were read."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from quire.core.arrays import Array
from quire.kernels.torch_arrays import to_array

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32",
}  # fmt: skip


class MemoryCheckpoint:
    """A `Checkpoint` of tensors that exist already."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.reads: list[tuple[str, int, int]] = []

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def location(self, name: str | None = None) -> str:
        return "memory" if name is None else f"memory of {name}"

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> str:
        return DTYPES[self._tensors[name].dtype]

    def read(self, name: str, start: int, stop: int) -> Array:
        self.reads.append((name, start, stop))
        return to_array(self._tensors[name][start:stop])
