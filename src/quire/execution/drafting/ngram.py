"""N-gram drafts: the tokens that followed the row's last n-gram before (prompt lookup decoding, Saxena 2023).

The longest n-gram that ends the row, from `min_size` to `max_size` tokens, is looked up among the row's own tokens. Of
several matches the last one counts: its continuation is the likeliest to be repeated.

This is the plain form, which reads all tokens of a row in each step. `quire.kernels.cpp.lookup` has the same drafts
from an index.
"""

import numpy as np
from numpy.typing import NDArray

from quire.core.plan import NewRow
from quire.execution.batch import IntArray

Tokens = NDArray[np.int32]


class NgramLookup:
    """A `Lookup` in a row's own tokens; token_ids int32 [max_rows, max_len], of all rows."""

    def __init__(self, token_ids: Tokens, max_drafts: int, min_size: int, max_size: int) -> None:
        self._token_ids, self._max_drafts = token_ids, max_drafts
        self._min_size, self._max_size = min_size, max_size

    def reset(self, new: NewRow) -> None:
        """Do nothing: there is no state."""

    def draft(self, rows: IntArray, last: IntArray) -> dict[int, list[int]]:
        """Return the tokens that followed the last tokens of each row where these occurred before."""
        drafts, max_len = dict[int, list[int]](), self._token_ids.shape[1]
        for row, place in zip(rows.tolist(), last.tolist(), strict=True):
            found = self._find(self._token_ids[row, : place + 1])
            draft = self._token_ids[row, found : min(found + self._max_drafts, found + max_len - 1 - place, place + 1)]
            if found and draft.size:
                drafts[row] = draft.tolist()
        return drafts

    def _find(self, tokens: Tokens) -> int:
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
