"""N-gram drafts: the tokens that followed the row's last n-gram before (prompt lookup decoding, Saxena 2023).

The longest n-gram that ends the row, from `max_size` tokens down to `min_size`, is looked up among the row's own
tokens. Of several matches the last one counts: its continuation is the likeliest to be repeated.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.core.plan import StepPlan
from quire.execution.batch import IntArray
from quire.execution.drafter import DraftRows
from quire.execution.drafting.pairs import RowPairs
from quire.model.batch import ForwardBatch

_SEARCHED = 1 << 20  # tokens searched at a time: 4 MiB of copies


class NgramDrafter:
    """Drafts from a row's own tokens; token_ids int32 [max_rows, max_len], of all rows."""

    def __init__(self, token_ids: NDArray[np.int32], min_size: int, max_size: int) -> None:
        self._token_ids, self._min_size, self._max_size = token_ids, min_size, max_size
        self._pairs = RowPairs(token_ids) if min_size > 1 else None

    def apply(self, plan: StepPlan) -> None:
        """Reset the rows with new sequences."""
        if self._pairs is not None:
            self._pairs.reset(new.row for new in plan.new_rows)

    def compute(self, batch: ForwardBatch) -> None:
        """Do nothing: there are no keys and values."""

    def draft(self, rows: DraftRows) -> Mapping[int, Sequence[int]]:
        """Return the tokens that followed the last tokens of each row where these occurred before."""
        drafts = dict[int, Sequence[int]]()
        if self._pairs is not None:
            places = self._pairs.recurring(rows.rows, rows.num_tokens)
            rows = DraftRows(*(each[places] for each in rows))
        if not rows.rows.size:
            return drafts
        for place in recurring(self._token_ids, rows.rows, rows.num_tokens, self._min_size):
            row, num_tokens, limit = (int(each[place]) for each in (rows.rows, rows.num_tokens, rows.limits))
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


def recurring(token_ids: NDArray[np.int32], rows: IntArray, num_tokens: IntArray, size: int) -> list[int]:
    """Return the indices of rows in which the last `size` tokens may occur twice: few in most steps.

    token_ids int32 [max_rows, max_len]; rows and num_tokens int64 [num]. All rows are searched at once: one by one
    takes ten times as long. Unused entries behind a row's tokens are searched, too, so there are false positives.
    """
    width = int(num_tokens.max())
    num_at_once, places = max(_SEARCHED // width, 1), list[int]()
    for start in range(0, len(rows), num_at_once):
        part = slice(start, start + num_at_once)
        own, last = rows[part], num_tokens[part] - 1
        tokens = token_ids[own, :width]                             # [num, width]
        ends = tokens == token_ids[own, last][:, None]              # where an n-gram may end
        ends[np.arange(len(own)), last] = False                     # the end of the row itself
        for before in range(1, min(size, width)):
            ends[:, before:] &= tokens[:, :-before] == token_ids[own, np.maximum(last - before, 0)][:, None]
        places += (np.flatnonzero(ends.any(axis=1)) + start).tolist()
    return places
