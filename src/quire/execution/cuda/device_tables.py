"""Block tables of all rows on a GPU: plans change entries of them, and a step gathers its own rows there.

Else each step would send the table of every row, as wide as the widest: 8 MB for 256 rows beside one of 131,072 tokens.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.plan import StepPlan


class TableEdits(NamedTuple):
    """Entries of tables [num_rows, num_columns]; one that is named twice has the same block both times."""

    places: NDArray[np.int64]  # [num], row * num_columns + column
    blocks: NDArray[np.int32]  # [num]


def table_edits(plan: StepPlan, tables: NDArray[np.int32]) -> TableEdits:
    """Return the entries that a plan changes, with the blocks that the host's tables have after it."""
    whole = [(fork.row, len(fork.block_ids)) for fork in plan.row_forks if fork.row != fork.source]
    whole += [(new.row, len(new.block_ids)) for new in plan.new_rows]
    num_columns = tables.shape[1]
    parts = [np.arange(count, dtype=np.int64) + row * num_columns for row, count in whole]
    parts.append(np.array(plan.table_rows, np.int64) * num_columns + np.array(plan.table_columns, np.int64))
    places = np.concatenate(parts)
    return TableEdits(places, tables.reshape(-1)[places])


class DeviceTables:
    """The tables, int32 [num_rows, num_columns]."""

    @torch.inference_mode()  # as the steps that view them
    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self._entries = torch.zeros(shape[0] * shape[1], dtype=torch.int32, device=device)
        self._tables = self._entries.view(shape)

    def edit(self, places: Tensor, blocks: Tensor) -> None:
        """Write `TableEdits` that are on the device, behind all steps launched so far."""
        if len(places):
            self._entries.index_copy_(0, places, blocks)

    def gather(self, rows: Tensor, num_columns: int, whole: Tensor | None = None) -> Tensor:
        """Return the first columns of some rows, [len(rows), num_columns]; they become those of `whole`, if given."""
        out = None if whole is None else whole[:, :num_columns]
        return torch.index_select(self._tables[:, :num_columns], 0, rows, out=out)
