"""A drafter with lengths: the method drafts for the rows that should have drafts, as many as they should have."""

from collections.abc import Mapping, Sequence

import numpy as np

from quire.core.plan import StepPlan
from quire.execution.drafter import Drafter, DraftRows
from quire.execution.drafting.lengths import DraftLengths
from quire.model.batch import ForwardBatch


class LimitedDrafter:
    """A `Drafter` around a method: beams have no drafts, and the drafts of other rows are as long as `lengths` says."""

    def __init__(self, method: Drafter, lengths: DraftLengths, max_rows: int) -> None:
        self._method, self._lengths = method, lengths
        self._is_beam = np.zeros(max_rows, dtype=bool)

    def apply(self, plan: StepPlan) -> None:
        """Start anew for each new row."""
        for new in plan.new_rows:
            self._is_beam[new.row] = new.beam is not None
        if plan.new_rows:
            self._lengths.reset([new.row for new in plan.new_rows])
        self._method.apply(plan)

    def compute(self, batch: ForwardBatch) -> None:
        """Compute the tokens of a step, if the method has keys and values."""
        self._method.compute(batch)

    def draft(self, rows: DraftRows) -> Mapping[int, Sequence[int]]:
        """Return the method's drafts for the rows that should have some."""
        limits = np.minimum(rows.limits, self._lengths.limits(rows.rows))
        limits[self._is_beam[rows.rows]] = 0
        drafted = np.flatnonzero(limits)
        if not drafted.size:
            return {}
        return self._method.draft(DraftRows(*(each[drafted] for each in rows._replace(limits=limits))))

    def record(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Tell the lengths and the method what became of a row's drafts."""
        self._lengths.record(row, num_drafts, num_accepted)
        self._method.record(row, num_drafts, num_accepted)
