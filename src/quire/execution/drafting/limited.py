"""Limited drafter: a method that computes drafts, with the lengths of drafts that a policy chooses before."""

from collections.abc import Mapping, Sequence

import numpy as np

from quire.core.plan import StepPlan
from quire.execution.batch import PersistentBatch, StepInputs
from quire.execution.drafter import DraftRows
from quire.execution.drafting.draft_model import DraftModel
from quire.execution.drafting.lengths import AdaptiveLength


class LimitedDrafter:
    """A `Drafter` around a method: beams have no drafts, and the drafts of other rows are as long as `lengths` says."""

    def __init__(
        self, method: DraftModel, lengths: AdaptiveLength, max_drafts: int, batch: PersistentBatch
    ) -> None:
        self._method, self._lengths, self._max_drafts = method, lengths, max_drafts
        max_rows, self._max_len = batch.token_ids.shape
        self._is_beam = np.zeros(max_rows, dtype=bool)

    def apply(self, plan: StepPlan) -> None:
        """Reset the state of each new row."""
        for new in plan.new_rows:
            self._is_beam[new.row] = new.beam is not None
        if plan.new_rows:
            self._lengths.reset([new.row for new in plan.new_rows])

    def draft(self, rows: DraftRows, step: StepInputs) -> Mapping[int, Sequence[int]]:
        """Return the method's drafts, with the lengths that the policy chooses."""
        longest = np.clip(self._max_len - rows.num_tokens, 0, self._max_drafts)
        longest[self._is_beam[rows.rows]] = 0
        limits = self._lengths.limits(rows.rows, longest, len(rows.rows))
        drafted = np.flatnonzero(limits)
        return self._method.draft(DraftRows(*(each[drafted] for each in rows)), limits[drafted], step)

    def record(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Pass the counts of a row's drafts to the policy."""
        self._lengths.record(row, num_drafts, num_accepted)
