"""GGUF checkpoint: the tensors of one file, quantized ones as the numbers that they stand for or as their blocks.

Pages that were read count as this process's memory while they are mapped, so they are dropped every so often.
"""

import mmap
from collections.abc import Collection, Mapping
from math import prod

import numpy as np

from quire.core.arrays import FLOAT32, STORED_DTYPES, UINT8, Array, empty
from quire.core.errors import ModelError
from quire.formats.gguf.blocks import KINDS, WeightBlocks, copy_blocks, empty_blocks, read_blocks, read_values
from quire.formats.gguf.gguf_file import GGUFFile
from quire.kernels.conversion import converted

RESIDENT_BYTES = 64 << 20     # read before pages are dropped
PORTION_BYTES = 16 << 20      # blocks read at a time

_DTYPES = {name: STORED_DTYPES[name] for name in ("F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64")}


class GGUFCheckpoint:
    """A `Checkpoint` of a file. `permuted`: tensors with permuted heads, and the dimensions of a head of each.

    `raised`: tensors that are stored plus 1. They, and quantized ones, read as float32.
    """

    def __init__(self, file: GGUFFile, permuted: Mapping[str, int], raised: Collection[str] = ()) -> None:
        self._file = file
        self._permuted, self._raised = permuted, frozenset(raised)
        self._bytes_read = 0

    def kind(self, name: str) -> str:
        """Return the type of a tensor's elements or blocks, by ggml's names."""
        return self._file.tensors[name].type.name

    @property
    def names(self) -> Collection[str]:
        return self._file.tensors.keys()

    def location(self, name: str | None = None) -> str:
        return str(self._file.path)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._file.tensors[name].shape

    def dtype(self, name: str) -> str:
        """Return the dtype of what `read` returns."""
        return "F32" if name in self._raised or self.is_quantized(name) else self._file.tensors[name].type.name

    def is_quantized(self, name: str) -> bool:
        """Return whether a tensor is stored in blocks. ModelError if they are of a type that is not read."""
        kind = self._file.tensors[name].type.name
        if kind not in KINDS and kind not in _DTYPES:
            raise self._file.error(f"tensor {name} has type {kind}, which is not supported; supported are "
                                   f"{', '.join([*_DTYPES, *KINDS])}")
        return kind in KINDS

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return rows [start, stop) of a tensor: whole ones that are not quantized in the file's memory."""
        stored = self._stored(name, start, stop)
        return converted(stored, FLOAT32) - 1 if name in self._raised else stored

    def _stored(self, name: str, start: int, stop: int) -> Array:
        entry = self._file.tensors[name]
        if not self.is_quantized(name):
            return self._bytes(name, start, stop).view(_DTYPES[entry.type.name]).reshape(-1, *entry.shape[1:])
        if len(entry.shape) == 1:  # all of it is one row of blocks
            return read_values(entry.type.name, self._bytes(name, 0, 1)).ravel()[start:stop]
        portions = self._portions(name, start, stop)
        found = [read_values(entry.type.name, self._bytes(name, *each)) for each in portions]
        values = found[0] if len(found) == 1 else np.concatenate(found)
        return values.reshape(-1, *entry.shape[1:])

    def blocks(self, name: str, start: int, stop: int) -> WeightBlocks:
        """Return rows [start, stop) of a quantized matrix, at least one, as elements and scales.

        Raises ModelError if a value is NaN or infinite in float32.
        """
        entry = self._file.tensors[name]
        whole = empty_blocks(entry.type.name, stop - start, prod(entry.shape[1:]))
        for first, last in self._portions(name, start, stop):
            rows = self._bytes(name, first, last)
            if not read_blocks(entry.type.name, rows, whole.rows(first - start, last - start)):
                raise self._not_finite(name)
        return whole

    def table(self, name: str) -> Array:
        """Return the bytes of a quantized matrix in memory of their own, uint8 [num_rows, bytes_per_row].

        Raises ModelError if a value is NaN or infinite in float32.
        """
        entry = self._file.tensors[name]
        num_rows = entry.shape[0]
        whole = empty((num_rows, entry.num_bytes // num_rows), UINT8)
        for first, last in self._portions(name, 0, num_rows):
            if not copy_blocks(entry.type.name, self._bytes(name, first, last), whole[first:last]):
                raise self._not_finite(name)
        return whole

    def _not_finite(self, name: str) -> ModelError:
        return self._file.error(f"tensor {name} has values that are NaN or infinite")

    def _portions(self, name: str, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the rows [start, stop) of a matrix in parts whose pages may be dropped in between."""
        entry = self._file.tensors[name]
        num_rows = max(PORTION_BYTES * entry.shape[0] // entry.num_bytes, 1)
        return [(first, min(first + num_rows, stop)) for first in range(start, stop, num_rows)]

    def _bytes(self, name: str, start: int, stop: int) -> Array:
        """Return the bytes of some rows, uint8 [num_rows, bytes_per_row]."""
        entry = self._file.tensors[name]
        num_rows = entry.shape[0] if len(entry.shape) > 1 or not self.is_quantized(name) else 1
        self._drop_pages(entry.num_bytes // num_rows * (stop - start))
        rows = np.frombuffer(self._file.map, np.uint8, entry.num_bytes, entry.offset).reshape(num_rows, -1)
        if name not in self._permuted:
            return rows[start:stop]
        return rows[stored_rows(np.arange(start, stop), self._permuted[name])]

    def _drop_pages(self, num_bytes: int) -> None:
        """Count bytes that are about to be read; let the pages of earlier ones go if they are many."""
        self._bytes_read += num_bytes
        if self._bytes_read > RESIDENT_BYTES:
            self._file.map.madvise(mmap.MADV_DONTNEED)
            self._bytes_read = num_bytes


def stored_rows(rows: Array, head_dim: int) -> Array:
    """Return where the rows of heads of `head_dim` dimensions are stored, given as Hugging Face counts them.

    llama.cpp stores dimension i of the first half of a head at 2 i, dimension i of the second half at 2 i + 1.
    """
    dimension, half = rows % head_dim, head_dim // 2
    stored: Array = rows - dimension + 2 * (dimension % half) + dimension // half
    return stored
