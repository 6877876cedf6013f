"""Low-rank addends of linear layers: the difference that adapters make (Hu et al. 2021), row by row of a batch.

The sums of a layer for a row with an adapter are W x + B (A x): A x is rounded to the model's dtype, B (A x) is a
float32 addend of the sums, before the bias, the rounding and the activation. The scale of an adapter is part of B.
Each product is of linear layers, a row of which does not depend on the other rows, so a row depends on its own adapter
alone. Rows without an adapter get the addend -0, which changes no number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from quire.kernels.layers import Linear
from quire.kernels.tensors import Tensor, contiguous, full, take_rows

if TYPE_CHECKING:
    from quire.kernels.triton.triton_low_rank import TritonSlots

NOTHING = -0.0  # x + -0.0 is x, also where x is -0.0


class Up(Protocol):
    """B of an adapter's module, packed."""

    num_bytes: int

    def __call__(self, inner: Tensor, /) -> Tensor:
        """Return float32 [num_rows, num_outputs] for A's outputs [num_rows, rank], in the model's dtype."""
        ...


class LowRankPart(NamedTuple):
    """B of outputs [first_output, first_output + num_outputs) of a layer, over `rank` outputs of A."""

    up: Up              # float32 [num_rows, num_outputs] of [num_rows, rank]
    first_input: int    # the first of A's outputs
    rank: int
    first_output: int   # gated layers: gates, then ups
    num_outputs: int


@dataclass(frozen=True, slots=True, eq=False)
class LowRankLayer:
    """The factors of one layer: A of all its parts, and a B for each; outputs of no part are unchanged."""

    down: Linear                       # A: [num_rows, rank], in the model's dtype
    rank: int                          # all parts together
    num_outputs: int                   # rows of the layer's weight
    parts: tuple[LowRankPart, ...]

    def addend(self, x: Tensor) -> Tensor:
        """Return float32 [num_rows, num_outputs] for x [num_rows, in_features]."""
        inner = self.down(x)
        addend = self.nothing(x)
        for part in self.parts:
            columns = slice(part.first_output, part.first_output + part.num_outputs)
            addend[:, columns] = part.up(contiguous(inner[:, part.first_input : part.first_input + part.rank]))
        return addend

    def nothing(self, x: Tensor) -> Tensor:
        """Return the addend of rows x without an adapter."""
        return full((len(x), self.num_outputs), NOTHING, x)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AdapterWeights:
    """An adapter in memory: factors by the names of a program's linear ops. `num_bytes`: of all of them."""

    layers: Mapping[str, LowRankLayer]
    num_bytes: int


class FactorSizes(NamedTuple):
    """Sizes of the factors that a linear op may have."""

    width: int                         # inputs of A
    num_outputs: int                   # outputs of the op
    parts: tuple[tuple[int, int], ...]  # the first output of each module that has factors of its own, and how many


class RowAdapters(NamedTuple):
    """The adapters of a batch's rows."""

    adapters: Sequence[AdapterWeights]
    of_row: Tensor                     # int32 [num_rows], indices of `adapters`, or slots; -1: none
    slots: "TritonSlots | None" = None  # None: the device has none
    groups: object = None              # rows by slot, as the slots group them

    def grouped(self) -> "RowAdapters":
        """Return them as layers need them: with the rows grouped by slot, if there are slots."""
        return self if self.slots is None else self._replace(groups=self.slots.group(self.of_row))

    def addend(self, name: str, x: Tensor) -> Tensor | None:
        """Return the addend of the linear op `name` for x [num_rows, in_features]; None if no row has one."""
        if self.slots is not None:
            return self.slots.addend(name, x, self.groups)
        addend: Tensor | None = None
        for index, adapter in enumerate(self.adapters):
            layer, rows = adapter.layers.get(name), np.flatnonzero(np.asarray(self.of_row) == index)
            if layer is None or not len(rows):
                continue
            if addend is None:
                addend = layer.nothing(x)
            addend[rows] = layer.addend(take_rows(x, rows))
        return addend
