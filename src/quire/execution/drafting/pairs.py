"""Pair filters: find the rows in which the last pair of tokens may have occurred before, in constant time per row.

A filter has a byte for each value of a hash. A step adds each row's second-to-last pair and looks up its last one, so
the time does not depend on the row's length. A filter has false positives, and no false negatives.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from quire.execution.batch import IntArray

Tokens = NDArray[np.int32]

_MIN_SIZE, _MAX_SIZE = 1 << 10, 1 << 17     # bytes of a row's filter
_SIZE_PER_TOKEN = 8                         # false positives in a full row: one new pair in nine


def pair_hash(first: Tokens, second: Tokens, size: int) -> NDArray[np.int64]:
    """Return numbers below `size`, a power of two, int64 [num], of token pairs int32 [num]."""
    mixed = first.astype(np.int64) * 0x9E3779B1 + second.astype(np.int64) * 0x85EBCA77
    hashed: NDArray[np.int64] = (mixed ^ (mixed >> 17)) & (size - 1)
    return hashed


class RowPairs:
    """Filters of all rows; token_ids int32 [max_rows, max_len]. Only rows that have been used take memory."""

    def __init__(self, token_ids: Tokens) -> None:
        max_rows, max_len = token_ids.shape
        size = 1 << (_SIZE_PER_TOKEN * max_len - 1).bit_length()
        self._size = min(max(size, _MIN_SIZE), _MAX_SIZE)
        self._token_ids = token_ids
        self._has_pair = np.zeros((max_rows, self._size), dtype=bool)
        self._ends = np.ones(max_rows, dtype=np.int64)      # pairs that end before this position are in the filter

    def reset(self, rows: Iterable[int]) -> None:
        """Empty the filters of rows with new sequences."""
        for row in rows:
            if self._ends[row] > 1:
                self._has_pair[row] = False
                self._ends[row] = 1

    def recurring(self, rows: IntArray, num_tokens: IntArray) -> IntArray:
        """Return the indices of rows in which the last pair may occur twice. rows, num_tokens int64 [num].

        A row has the tokens of the previous call, followed by any number of new ones.
        """
        last = num_tokens - 1
        gaps = last - self._ends[rows]
        for place in np.flatnonzero(gaps > 1).tolist():
            row, end = int(rows[place]), int(last[place])
            tokens = self._token_ids[row, self._ends[row] - 1 : end]
            self._has_pair[row, pair_hash(tokens[:-1], tokens[1:], self._size)] = True
        one = np.flatnonzero(gaps == 1)
        own, ends = rows[one], last[one] - 1
        self._has_pair[own, pair_hash(self._token_ids[own, ends - 1], self._token_ids[own, ends], self._size)] = True
        self._ends[rows] = np.maximum(last, 1)
        before = self._token_ids[rows, np.maximum(last - 1, 0)]
        hashes = pair_hash(before, self._token_ids[rows, last], self._size)
        places: IntArray = np.flatnonzero(self._has_pair[rows, hashes])
        return places
