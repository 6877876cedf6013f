"""Tensor reader: tensors of a checkpoint as arrays, each checked before and after it is read; stacked experts.

Most checkpoints have a tensor for each expert. transformers 5 can write them as it keeps them, and gpt-oss has nothing
else: a tensor [num_experts, rows, ...] of several modules' rows, one after the other or in turns.
"""

from collections.abc import Collection, Mapping
from math import prod
from typing import NamedTuple, Protocol

import numpy as np

from quire.core.arrays import STORED_DTYPES, Array, DType, dtype_name, empty
from quire.core.errors import ModelError
from quire.kernels.conversion import all_finite, convert, converted
from quire.model.spec import MAX_EXPERTS, WeightMap

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # safetensors' names


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

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return rows [start, stop) of a tensor as stored, perhaps in the file's memory: copy it soon.

        A tensor without dimensions has one row.
        """


def read_rows(
    checkpoint: Checkpoint,
    name: str,
    shape: tuple[int, ...],
    rows: tuple[int, int] | None = None,
    dtypes: Collection[str] = FLOAT_DTYPES,
) -> Array:
    """Return rows [start, stop) of a tensor of a known shape, or all of them; of a convolution, as a matrix.

    Raises ModelError, before anything is read, if the tensor is missing or has another shape or none of the dtypes.
    """
    require_tensor(checkpoint, name, shape, dtypes)
    part = checkpoint.read(name, *(rows or (0, shape[0] if shape else 1)))
    return part.reshape(len(part), -1) if len(shape) == 2 and part.ndim > 2 else part


def require_tensor(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtypes: Collection[str] = FLOAT_DTYPES
) -> None:
    """Raise ModelError if a tensor is missing or has another shape or none of the dtypes."""
    if name not in checkpoint.names:
        raise ModelError(f"{checkpoint.location()}: tensor {name} is missing; expected shape {list(shape)}")
    found, dtype = checkpoint.shape(name), checkpoint.dtype(name)
    if found != shape and (len(found) not in (4, 5) or len(shape) != 2 or (found[0], prod(found[1:])) != shape):
        raise ModelError(
            f"{checkpoint.location(name)}: tensor {name} has shape {list(found)}, expected {list(shape)}"
        )
    if dtype not in dtypes:
        raise ModelError(
            f"{checkpoint.location(name)}: tensor {name} has dtype {dtype}, expected one of {', '.join(dtypes)}"
            + ("; quantized weights need a quantization_config" if dtypes == FLOAT_DTYPES else "")
        )


ELEMENTS_AT_ONCE = 1 << 22  # converted at a time: an embedding table in float32 may be gigabytes


class TensorReader:
    """Reader of tensors by name. Every failure is a ModelError that names the tensor and its place.

    `takes_stored_tables`: the back end looks rows up in a `StoredTable`, too.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: DType, *, takes_stored_tables: bool = True) -> None:
        self.dtype = dtype                # the model's
        self.takes_stored_tables = takes_stored_tables
        self.names_read: set[str] = set()
        self._checkpoint = checkpoint

    @property
    def names(self) -> Collection[str]:
        return self._checkpoint.names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which must be here."""
        return self._checkpoint.shape(name)

    def stored_dtype(self, name: str) -> str:
        """Return the dtype of a tensor as stored, by safetensors' names: BF16, I32, F8_E4M3."""
        return self._checkpoint.dtype(name)

    def is_converted(self, name: str, dtype: DType) -> bool:
        """Return whether `floats` converts a tensor, which must be here, to `dtype`: not in the file's memory."""
        return STORED_DTYPES.get(self.stored_dtype(name)) != dtype

    def error(self, name: str, message: str) -> ModelError:
        """Return an error that says of a tensor what is wrong with it; the caller raises it."""
        place = self._checkpoint.location(name if name in self.names else None)
        return ModelError(f"{place}: tensor {name} {message}")

    def floats(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: tuple[int, int] | None = None,
        *,
        dtype: DType | None = None,
        is_transposed: bool = False,
    ) -> Array:
        """Return rows [start, stop) of a tensor of floats, or all, in the model's dtype or in `dtype`.

        One that has the dtype may be the file's own memory. A transposed tensor has its shape
        reversed in the file. Raises ModelError if a value is not finite in that dtype.
        """
        if is_transposed:
            whole = read_rows(self._checkpoint, name, shape[::-1])
            part = whole.T if rows is None else whole.T[slice(*rows)]
        elif not shape:
            part = read_rows(self._checkpoint, name, shape)
        else:
            part = self._rows(name, shape, rows or (0, shape[0]), dtype or self.dtype)
        part = converted(part, dtype or self.dtype)
        if not all_finite(part):
            raise self.error(name, f"has values that are NaN or infinite in {dtype_name(part.dtype)}")
        self.names_read.add(name)
        return part

    def _rows(self, name: str, shape: tuple[int, ...], rows: tuple[int, int], dtype: DType) -> Array:
        """Return rows [start, stop) of a tensor: as stored, or many of another dtype converted a part at a time."""
        start, stop = rows
        num_elements = (stop - start) * prod(shape[1:])
        if num_elements <= ELEMENTS_AT_ONCE or name not in self.names or not self.is_converted(name, dtype):
            return read_rows(self._checkpoint, name, shape, rows)
        whole = empty((stop - start, *shape[1:]), dtype)
        step = max(ELEMENTS_AT_ONCE // prod(shape[1:]), 1)
        for first in range(start, stop, step):
            part = first, min(first + step, stop)
            convert(read_rows(self._checkpoint, name, shape, part), whole[first - start : part[1] - start])
        return whole

    def raw(
        self, name: str, shape: tuple[int, ...], dtypes: Collection[str], rows: tuple[int, int] | None = None
    ) -> Array:
        """Return rows [start, stop) of a tensor, or all, as stored: one of `dtypes`, by safetensors' names."""
        part = read_rows(self._checkpoint, name, shape, rows, dtypes)
        self.names_read.add(name)
        return part


class StackedPart(NamedTuple):
    """Rows [start::step] of one expert in a stacked tensor, `num_rows` of them; None: a tensor under another name."""

    tensor: str
    expert: int | None = None
    is_transposed: bool = False
    start: int = 0
    step: int = 1
    num_rows: int = 0


def with_single_experts(checkpoint: Checkpoint, names: WeightMap) -> Checkpoint:
    """Return a checkpoint with tensors for single experts, by the names of a map; itself if it has them so.

    Raises ModelError for a stacked tensor with a shape that does not divide.
    """
    parts: dict[str, StackedPart] = {}
    for stacked in () if names.experts is None else names.experts.stacked:
        for name in checkpoint.names:
            if not name.endswith(f".{stacked.name}"):
                continue
            stem, shape = name.removesuffix(stacked.name), _shape(checkpoint, name)
            num_modules = len(stacked.tensors)
            is_transposed = stacked.is_transposed or 0 < stacked.width != shape[-1]
            num_rows = shape[2 if is_transposed else 1] // num_modules
            for index, tensor in enumerate(stacked.tensors):
                start, step = (index, num_modules) if stacked.is_interleaved else (index * num_rows, 1)
                for expert in range(shape[0]):
                    own = stem + tensor.format(expert=expert)
                    parts[own] = StackedPart(name, expert, is_transposed, start, step, num_rows)
    for name in checkpoint.names:
        for old, new in names.renamed.items():
            if f".{name}".endswith(f".{old}"):
                parts[name.removesuffix(old) + new] = StackedPart(name)
    if not parts:
        return checkpoint
    renamed = {} if names.experts is None else names.experts.stacked_names
    for name in checkpoint.names:
        for old, new in renamed.items():
            if name.endswith(f".{old}"):
                parts[name.removesuffix(old) + new] = StackedPart(name)
    return StackedCheckpoint(checkpoint, parts)


def _shape(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    shape = checkpoint.shape(name)
    if len(shape) < 2 or shape[0] > MAX_EXPERTS:
        raise ModelError(
            f"{checkpoint.location(name)}: tensor {name} of all experts has shape {list(shape)}, expected "
            f"[experts, rows, ...] of at most {MAX_EXPERTS} experts"
        )
    return shape


class StackedCheckpoint:
    """A `Checkpoint` in which `parts` are tensors by their own names, in place of those that they are parts of."""

    def __init__(self, checkpoint: Checkpoint, parts: Mapping[str, StackedPart]) -> None:
        self._checkpoint, self._parts = checkpoint, parts
        whole = {part.tensor for part in parts.values()}
        self._names = {*parts, *(name for name in checkpoint.names if name not in whole)}

    @property
    def names(self) -> Collection[str]:
        return self._names

    def location(self, name: str | None = None) -> str:
        """Return the file of a tensor, or the checkpoint's place."""
        return self._checkpoint.location(self._stored(name) if name is not None else None)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        shape, part = self._checkpoint.shape(self._stored(name)), self._parts.get(name)
        if part is None or part.expert is None:
            return shape
        rest = shape[1:2] if part.is_transposed else shape[2:]
        return part.num_rows, *rest

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor."""
        return self._checkpoint.dtype(self._stored(name))

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return rows [start, stop) of a tensor."""
        part = self._parts.get(name)
        if part is None or part.expert is None:
            return self._checkpoint.read(self._stored(name), start, stop)
        whole = self._checkpoint.read(part.tensor, part.expert, part.expert + 1)[0]
        rows = whole.T if part.is_transposed else whole
        first, end = part.start + start * part.step, part.start + stop * part.step
        return np.ascontiguousarray(rows[first : end : part.step])

    def _stored(self, name: str) -> str:
        return self._parts[name].tensor if name in self._parts else name
