"""Lengths of drafts: how many tokens a row should have drafted, by what became of its drafts so far."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from quire.execution.batch import IntArray


class DraftLengths(Protocol):
    """The most drafts that each row should have next. Counts, no clocks."""

    def reset(self, rows: Iterable[int]) -> None:
        """Forget what was recorded of rows, which have new owners."""

    def limits(self, rows: IntArray) -> IntArray:
        """Return the most drafts for each of `rows` int64 [num], 0 for none: int64 [num]."""

    def record(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Take the count of a row's drafts that a step has verified, and of those that it has accepted."""


class FixedLength:
    """The same length for all rows."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def reset(self, rows: Iterable[int]) -> None:
        """Do nothing."""

    def limits(self, rows: IntArray) -> IntArray:
        """Return the length for each row."""
        return np.full(len(rows), self._num_drafts)

    def record(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Do nothing."""
