"""Drafter protocol: the worker's interface to a method of speculative decoding, which proposes next tokens of rows.

A worker passes each plan to its drafter before the forward pass, and gets drafts from it after sampling; a drafter with
a model computes the step's tokens then, too. The drafts are returned to the scheduler with the step's result. A later
step verifies them (`quire.execution.row_results`), if budget and blocks allow it. The output of a row does not depend
on its drafts.
"""

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from quire.core.plan import RowResult, StepPlan
from quire.execution.batch import IntArray, StepInputs


class DraftRows(NamedTuple):
    """The rows that may have drafts: a token was sampled for each in this step, and another one follows it.

    All are int64 [num]. last: position of each row's last known token, sampled or forced; num_computed: tokens that
    have keys and values: up to that position, or fewer where a grammar has forced tokens.
    """

    rows: IntArray
    last: IntArray
    num_computed: IntArray

    @property
    def num_tokens(self) -> IntArray:
        """Known tokens of each row, int64 [num]: also the position of its first draft."""
        return self.last + 1


class Drafter(Protocol):
    """Method that proposes next tokens. It reads the tokens of rows from the batch that it was made with."""

    @property
    def reads_hidden(self) -> bool:
        """Return whether it reads hidden states of all of a step's tokens."""

    def apply(self, plan: StepPlan) -> None:
        """Reset the state of each new row of a plan. The batch has the plan's changes already."""

    def draft(self, rows: DraftRows, step: StepInputs) -> Mapping[int, Sequence[int]]:
        """Return drafts by row: token ids, at least one, for which the row has positions. Other rows are left out.

        Call once for each step, also without rows: a drafter with a cache of its own computes the keys and values of
        the step's tokens, on the same slots.
        """

    def record(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Record the numbers of draft tokens of a row that a step has verified and accepted."""


def rows_to_draft(inputs: StepInputs, results: Mapping[int, RowResult], failures: Container[int]) -> DraftRows:
    """Return the rows that continue after a step. `results`: of rows that differ from one token per sample."""
    if not results and not failures:    # most steps: no call of NumPy, for each takes longer than the lookup of a row
        return DraftRows(inputs.sample_rows, inputs.sample_num_tokens, inputs.sample_num_tokens)
    is_first = np.ones(len(inputs.sample_rows), dtype=bool)     # first of a row's samples, which are consecutive
    is_first[1:] = inputs.sample_rows[1:] != inputs.sample_rows[:-1]
    rows, num_computed = inputs.sample_rows[is_first], inputs.sample_num_tokens[is_first]
    last, continues = num_computed.copy(), np.ones(len(rows), dtype=bool)
    for place, row in enumerate(rows.tolist()):
        own = results.get(row)
        continues[place] = row not in failures and not (own is not None and (own.has_ended or own.is_late))
        if own is not None and continues[place]:
            num_computed[place] += len(own.token_ids) - 1
            last[place] = num_computed[place] + len(own.forced)
    return DraftRows(rows[continues], last[continues], num_computed[continues])
