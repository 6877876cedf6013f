"""Pooling of hidden states: the vector of a row, built up over the steps that compute its prompt.

A row is pooled by itself, on the host, so its bits do not depend on the batch. A mean adds the states one by one in the
order of the tokens, in float64, so they do not depend on the chunks either.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.pooling import Pool
from quire.kernels.tensors import Tensor, floats, like

NOT_FINITE = "the model gave hidden states that are NaN or infinite"


class RowPool:
    """The state of one row that pools. A row that starts again gets a new one."""

    def __init__(self, pool: Pool, num_tokens: int) -> None:
        self.pool, self.num_tokens = pool, num_tokens          # the prompt's
        self._sum: NDArray[np.float64] | None = None           # sum of the states so far; `cls`: the first state

    def append(self, states: Tensor, start: int) -> None:
        """Add the hidden states [num_tokens, width] of the tokens from position `start` on, in order."""
        if self.pool.kind == "cls":
            states = states[: 1 if start == 0 else 0]
        elif self.pool.kind == "last":
            states = states[-1:]
        rows = floats(states).astype(np.float64)
        if self.pool.kind == "last" or (self._sum is None and len(rows) > 0):
            self._sum, rows = rows[0].copy(), rows[1:]
        for row in rows:  # np.sum promises no order, and np.cumsum, which does, takes 75 times as long (2,048 x 896)
            assert self._sum is not None, "the states before are missing"
            self._sum += row

    def vector(self) -> NDArray[np.float32]:
        """Return the pooled vector, its first dimensions if so asked, and normalized; after the last state."""
        assert self._sum is not None, "no state was appended"
        vector = self._sum / self.num_tokens if self.pool.kind == "mean" else self._sum
        vector = vector[: self.pool.num_dimensions or None]
        if self.pool.normalizes:
            length = np.sqrt(np.square(vector).sum())
            vector = vector / max(length, np.finfo(np.float32).tiny)
        return vector.astype(np.float32)


class PooledEntry(NamedTuple):
    """An entry of a plan that pools: tokens [begin, end) of the flat batch, from position `start` of row `row` on."""

    row: int
    begin: int
    end: int
    start: int
    state: RowPool

    @property
    def is_last(self) -> bool:
        """True if it ends with the last token of the prompt."""
        return self.start + self.end - self.begin == self.state.num_tokens

    def scored(self, hidden: Tensor) -> NDArray[np.float32]:
        """Return the state [width] that the head reads, before it is rounded to the model's dtype.

        One that is not of the last token is of a whole prompt.
        """
        if self.state.pool.kind == "last":
            state: NDArray[np.float32] = floats(hidden[self.end - 1 : self.end])[0]
            return state
        assert self.start == 0, "a part of the prompt was computed in an earlier step"
        self.state.append(hidden[self.begin : self.end], 0)
        return self.state.vector()


def pool(
    entries: Sequence[PooledEntry], hidden: Tensor, logits: Callable[[Tensor], Tensor]
) -> tuple[dict[int, NDArray[np.float32]], dict[int, str]]:
    """Return the vectors of the rows with prompts that end here, and the rows without a finite one, with the reason.

    hidden [num_tokens, width]; logits: from [num_rows, width] to float32 [num_rows, vocab]. Called at most once, for
    the rows that are scored by the logits of some tokens.
    """
    vectors = dict[int, NDArray[np.float32]]()
    scored = [each for each in entries if each.state.pool.token_ids and each.is_last]
    if scored:
        found = logits(like(np.stack([each.scored(hidden) for each in scored]), hidden))
        for each, row in zip(scored, found, strict=True):
            vectors[each.row] = floats(row[list(each.state.pool.token_ids)]).copy()
    for each in entries:
        if not each.state.pool.token_ids:
            each.state.append(hidden[each.begin : each.end], each.start)
            if each.is_last:
                vectors[each.row] = each.state.vector()
    failures = {row: NOT_FINITE for row, vector in vectors.items() if not np.isfinite(vector).all()}
    return {row: vector for row, vector in vectors.items() if row not in failures}, failures
