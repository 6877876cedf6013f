"""Limited drafter: a drafting method with the lengths of drafts that a policy chooses."""

from collections.abc import Mapping, Sequence

import numpy as np

from quire.core.plan import StepPlan
from quire.execution.drafter import Drafter, DraftRows
from quire.execution.drafting.lengths import DraftLengths
from quire.model.batch import ForwardBatch


class LimitedDrafter:
    """A `Drafter` around a method: beams have no drafts, and the drafts of other rows are as long as `lengths` says.

    `is_lookup`: the method costs almost nothing and finds drafts for some rows only, so it runs first, and the lengths
    are chosen for the rows that it found drafts for. With any other method the lengths are chosen first.
    """

    def __init__(
        self, method: Drafter, lengths: DraftLengths, max_drafts: int, max_rows: int, *, is_lookup: bool
    ) -> None:
        self._method, self._lengths, self._max_drafts, self._is_lookup = method, lengths, max_drafts, is_lookup
        self._is_beam = np.zeros(max_rows, dtype=bool)

    def apply(self, plan: StepPlan) -> None:
        """Reset the state of each new row."""
        for new in plan.new_rows:
            self._is_beam[new.row] = new.beam is not None
        if plan.new_rows:
            self._lengths.reset([new.row for new in plan.new_rows])
        self._method.apply(plan)

    def compute(self, batch: ForwardBatch) -> None:
        """Compute the tokens of a step, if the method has keys and values."""
        self._method.compute(batch)

    def draft(self, rows: DraftRows) -> Mapping[int, Sequence[int]]:
        """Return the method's drafts, with the lengths that the policy chooses."""
        limits = np.minimum(rows.limits, self._max_drafts)
        limits[self._is_beam[rows.rows]] = 0
        if not self._is_lookup:
            limits = self._lengths.limits(rows.rows, limits, len(rows.rows))
        drafted = np.flatnonzero(limits)
        if not drafted.size or (self._is_lookup and not self._lengths.may_pay(len(rows.rows))):
            return {}
        found = self._method.draft(DraftRows(*(each[drafted] for each in rows._replace(limits=limits))))
        return self._cut(found, len(rows.rows)) if self._is_lookup and found else found

    def record(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Pass the counts of a row's drafts to the policy and the method."""
        self._lengths.record(row, num_drafts, num_accepted)
        self._method.record(row, num_drafts, num_accepted)

    def _cut(self, found: Mapping[int, Sequence[int]], num_rows: int) -> dict[int, Sequence[int]]:
        """Return drafts cut to the lengths that the policy chooses in a step of `num_rows` rows."""
        rows = np.fromiter(found, dtype=np.int64, count=len(found))
        longest = np.fromiter(map(len, found.values()), dtype=np.int64, count=len(found))
        lengths = self._lengths.limits(rows, longest, num_rows).tolist()
        return {row: drafts[:length] for (row, drafts), length in zip(found.items(), lengths, strict=True) if length}
