"""Logprobs of the likeliest tokens of rows."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TopLogprobs(NamedTuple):
    """Arrays [num, 1 + max(counts)]: a row's token, then its likeliest, in order; behind those, nothing is said."""

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int64]  # from 1


def empty(counts: NDArray[np.int64]) -> TopLogprobs:
    """Return room for the answer."""
    shape = (len(counts), 1 + int(counts.max(initial=0)))
    return TopLogprobs(np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.zeros(shape, np.int64))
