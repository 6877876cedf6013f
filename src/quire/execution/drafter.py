"""Drafters: the protocol by which a worker has the next tokens of rows guessed. Speculative decoding is behind it.

A worker tells its drafter of new rows before each forward pass, and asks it for drafts when the step is sampled. The
drafts go to the scheduler with the step's result; a later step verifies them (`quire.decoding.verification`), if it has
room for them. What a row outputs does not depend on them.
"""

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from quire.core.plan import RowResult, StepPlan
from quire.execution.batch import IntArray, StepInputs
from quire.model.batch import ForwardBatch


class DraftRows(NamedTuple):
    """The rows that may have drafts: a token was sampled for each in this step, and another one follows it.

    All are int64 [num]. num_tokens: known tokens of each row with the sampled one, so also the position of its first
    draft; num_computed: those of them that have keys and values, all but the last one, or but the last ones where a
    grammar has forced tokens; limits: the most drafts for which the row has positions, 0 or more.
    """

    rows: IntArray
    num_tokens: IntArray
    num_computed: IntArray
    limits: IntArray


class Drafter(Protocol):
    """Guesses of next tokens. It reads the tokens of rows from the batch that it was made with."""

    def apply(self, plan: StepPlan) -> None:
        """Start anew for each new row of a plan. The batch has the plan's changes already."""

    def compute(self, batch: ForwardBatch) -> None:
        """Compute the tokens of a step, too: for a drafter with keys and values of its own, on the same slots."""

    def draft(self, rows: DraftRows) -> Mapping[int, Sequence[int]]:
        """Return drafts by row: token ids, at least one, at most the row's limit. Rows without drafts are left out."""

    def record(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Take the count of a row's drafts that a step has verified, and of those that it has accepted."""


def rows_to_draft(
    inputs: StepInputs, results: Mapping[int, RowResult], failures: Container[int], max_len: int
) -> DraftRows:
    """Return the rows that continue after a step. `results`: of rows that differ from one token per sample."""
    is_first = np.ones(len(inputs.sample_rows), dtype=bool)     # of the samples of a row, which are consecutive
    is_first[1:] = inputs.sample_rows[1:] != inputs.sample_rows[:-1]
    rows, num_computed = inputs.sample_rows[is_first], inputs.sample_num_tokens[is_first]
    num_tokens = num_computed + 1
    if results or failures:
        continues = np.ones(len(rows), dtype=bool)
        for place, row in enumerate(rows.tolist()):
            own = results.get(row)
            continues[place] = row not in failures and not (own is not None and (own.has_ended or own.is_late))
            if own is not None and continues[place]:
                num_computed[place] += len(own.token_ids) - 1
                num_tokens[place] = num_computed[place] + 1 + len(own.forced)
        rows, num_computed, num_tokens = rows[continues], num_computed[continues], num_tokens[continues]
    return DraftRows(rows, num_tokens, num_computed, np.maximum(max_len - num_tokens, 0))
