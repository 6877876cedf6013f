"""N-gram drafts: what followed the row's last tokens where they were before (prompt lookup decoding, Saxena 2023).

The longest n-gram that ends the row, from `max_size` tokens down to `min_size`, is looked up among the row's own
tokens; of several places the last one counts, because it is the likeliest to go on alike.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.core.plan import StepPlan
from quire.execution.drafter import DraftRows
from quire.model.batch import ForwardBatch


class NgramDrafter:
    """Drafts from a row's own tokens; token_ids int32 [max_rows, max_len], of all rows."""

    def __init__(self, token_ids: NDArray[np.int32], min_size: int, max_size: int) -> None:
        self._token_ids, self._min_size, self._max_size = token_ids, min_size, max_size

    def apply(self, plan: StepPlan) -> None:
        """Do nothing: a row's tokens are all that is known of it."""

    def compute(self, batch: ForwardBatch) -> None:
        """Do nothing: there are no keys and values."""

    def draft(self, rows: DraftRows) -> Mapping[int, Sequence[int]]:
        """Return what followed the last tokens of each row, if they were there before."""
        drafts = dict[int, Sequence[int]]()
        for row, num_tokens, limit in zip(
            rows.rows.tolist(), rows.num_tokens.tolist(), rows.limits.tolist(), strict=True
        ):
            found = self._find(self._token_ids[row, :num_tokens])
            if found:
                drafts[row] = self._token_ids[row, found : min(found + limit, num_tokens)].tolist()
        return drafts

    def record(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Do nothing."""

    def _find(self, tokens: NDArray[np.int32]) -> int:
        """Return the position behind the last earlier occurrence of the longest n-gram that ends `tokens`; 0: none."""
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # positions of an n-gram's last token
        found = 0
        for size in range(1, min(self._max_size, len(tokens) - 1) + 1):
            ends = ends[ends >= size - 1]
            ends = ends[tokens[ends - size + 1] == tokens[-size]]
            if not ends.size:
                break
            if size >= self._min_size:
                found = int(ends[-1]) + 1
        return found
