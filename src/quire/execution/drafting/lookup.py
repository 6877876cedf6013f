"""Lookup drafter: drafts that are found among known tokens, with the lengths that a policy chooses."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from quire.core.plan import NewRow, StepPlan
from quire.execution.batch import IntArray, StepInputs
from quire.execution.drafter import DraftRows
from quire.execution.drafting.lengths import AdaptiveLength


class Lookup(Protocol):
    """Methods that find drafts among known tokens. They know the tokens of rows and the most tokens of a draft."""

    def reset(self, new: NewRow) -> None:
        """Begin a row with a new sequence. It is the row's owner until the next call."""

    def draft(self, rows: IntArray, last: IntArray) -> dict[int, list[int]]:
        """Return the drafts that were found, by row, in the order of `rows`; last: as in `DraftRows`."""


class LookupDrafter:
    """A `Drafter` around a lookup.

    A lookup costs almost nothing and finds drafts for few rows, so it runs first, and the lengths are chosen for the
    rows that it found drafts for. Beams have no drafts.
    """

    def __init__(self, lookup: Lookup, lengths: AdaptiveLength) -> None:
        self._lookup, self._lengths = lookup, lengths
        self._beams = set[int]()    # rows

    def apply(self, plan: StepPlan) -> None:
        """Reset the state of each new row."""
        if plan.new_rows:
            self._lengths.reset([new.row for new in plan.new_rows])
            for new in plan.new_rows:
                self._lookup.reset(new)
                (self._beams.discard if new.beam is None else self._beams.add)(new.row)

    def draft(self, rows: DraftRows, _step: StepInputs) -> Mapping[int, Sequence[int]]:
        """Return the drafts that were found, with the lengths that the policy chooses."""
        num_rows = len(rows.rows)
        if not num_rows or not self._lengths.may_pay(num_rows):
            return {}
        if self._beams:
            is_drafted = ~np.isin(rows.rows, list(self._beams))
            rows = DraftRows(*(each[is_drafted] for each in rows))
        found = self._lookup.draft(rows.rows, rows.last)
        return self._cut(found, num_rows) if found else found

    def record(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Pass the counts of a row's drafts to the policy."""
        self._lengths.record(row, num_drafts, num_accepted)

    def _cut(self, found: Mapping[int, Sequence[int]], num_rows: int) -> dict[int, Sequence[int]]:
        """Return drafts cut to the lengths that the policy chooses in a step of `num_rows` rows."""
        rows = np.fromiter(found, dtype=np.int64, count=len(found))
        longest = np.fromiter(map(len, found.values()), dtype=np.int64, count=len(found))
        lengths = self._lengths.limits(rows, longest, num_rows).tolist()
        return {row: drafts[:length] for (row, drafts), length in zip(found.items(), lengths, strict=True) if length}
