"""Checkpoint of stacked experts: one tensor for all experts of a layer, read as one tensor for each expert.

Most checkpoints have a tensor for each expert. transformers 5 can write them as it keeps them, and gpt-oss has nothing
else: a tensor [num_experts, rows, ...] of several modules' rows, one after the other or in turns.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from quire.core.arrays import Array
from quire.core.errors import ModelError
from quire.model.checkpoints.tensor_reader import Checkpoint
from quire.model.spec import MAX_EXPERTS, WeightMap


class StackedPart(NamedTuple):
    """Rows [start::step] of one expert in a stacked tensor, `num_rows` of them; None: a tensor under another name."""

    tensor: str
    expert: int | None = None
    is_transposed: bool = False
    start: int = 0
    step: int = 1
    num_rows: int = 0


def with_single_experts(checkpoint: Checkpoint, names: WeightMap) -> Checkpoint:
    """Return a checkpoint with tensors for single experts; itself if its experts are not stacked.

    Raises ModelError for a stacked tensor with a shape that does not divide.
    """
    parts: dict[str, StackedPart] = {}
    for stacked in () if names.experts is None else names.experts.stacked:
        for name in checkpoint.names:
            if not name.endswith(f".{stacked.name}"):
                continue
            stem, shape = name.removesuffix(stacked.name), _shape(checkpoint, name)
            num_modules = len(stacked.tensors)
            num_rows = shape[2 if stacked.is_transposed else 1] // num_modules
            for index, tensor in enumerate(stacked.tensors):
                start, step = (index, num_modules) if stacked.is_interleaved else (index * num_rows, 1)
                for expert in range(shape[0]):
                    own = stem + tensor.format(expert=expert)
                    parts[own] = StackedPart(name, expert, stacked.is_transposed, start, step, num_rows)
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
