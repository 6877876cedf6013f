"""Lengths of drafts: how many tokens a row should have drafted, by what became of its drafts so far.

A draft token is worth the probability that it is kept: a row's acceptance to the power of the token's place in the
draft. A step is as good as its tokens by its cost. So the likeliest draft tokens of all rows are taken, as many as
make that highest (compare Leviathan et al. 2023, section 3.5, for one row). With many rows there are none: each more
costs about as much as a token brings.

A row of which too few drafts are kept to pay for any pauses, each time twice as long, and then tries again. Counts, no
clocks.
"""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.execution.batch import IntArray
from quire.execution.drafting.step_cost import StepCost

PRIOR = np.array([0.6, 0.4])  # draft tokens accepted and rejected of a row without a past: one in all
RETRY = PRIOR / 4  # of a row that tries again: after a few rejected drafts it pauses again
MIN_GAIN = 1.03  # times the tokens by cost, at best: for less nothing is looked up
KEPT = 0.875  # of the counts with each draft that is verified: about the last eight of them matter
PAUSES = (4, 64)  # drafts that a row passes over, the first time and at most


class DraftLengths(Protocol):
    """The most drafts that each row should have next. Counts, no clocks."""

    def reset(self, rows: Iterable[int]) -> None:
        """Forget what was recorded of rows, which have new owners."""

    def may_pay(self, num_rows: int) -> bool:
        """Return whether drafts are worth a look in a step of so many sequences, at least one."""

    def limits(self, rows: IntArray, longest: IntArray, num_rows: int) -> IntArray:
        """Return how many drafts each of `rows` should have: int64 [num], from 0 to `longest`, int64 [num].

        num_rows: sequences in the step, those that can have no drafts among them. Call once for each step.
        """

    def record(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Take the count of a row's drafts that a step has verified, and of those that it has accepted."""


class AdaptiveLength:
    """Lengths that make the tokens of a step by its cost highest, as far as the drafts verified so far tell."""

    def __init__(self, cost: StepCost, max_rows: int) -> None:
        self._cost = cost
        self._counts = np.tile(PRIOR, (max_rows, 1))  # draft tokens accepted and rejected; the last ones count most
        self._pauses = np.zeros(max_rows, dtype=np.int64)  # drafts still to be passed over
        self._next_pauses = np.full(max_rows, PAUSES[0])

    def reset(self, rows: Iterable[int]) -> None:
        """Forget what was recorded of rows, which have new owners."""
        which = list(rows)
        self._counts[which], self._pauses[which], self._next_pauses[which] = PRIOR, 0, PAUSES[0]

    def may_pay(self, num_rows: int) -> bool:
        """Return whether drafts that are all kept would bring enough."""
        return self._cost.most_gain(num_rows) > MIN_GAIN

    def limits(self, rows: IntArray, longest: IntArray, num_rows: int) -> IntArray:
        """Return the lengths with the most tokens by cost. A row that would get none for its past begins to pause."""
        pauses = self._pauses[rows] > 0
        self._pauses[rows] -= pauses
        acceptance = self._acceptance(rows)
        lengths = self._best(acceptance, np.where(pauses, 0, longest), num_rows)
        hopeless = rows[(lengths == 0) & (acceptance < PRIOR[0] / PRIOR.sum()) & ~pauses & (longest > 0)]
        self._counts[hopeless], self._pauses[hopeless] = RETRY, self._next_pauses[hopeless]
        self._next_pauses[hopeless] = np.minimum(2 * self._next_pauses[hopeless], PAUSES[1])
        return lengths

    def record(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Count what was verified."""
        self._counts[row] = KEPT * self._counts[row] + (num_accepted, num_accepted < num_drafts)
        if num_accepted:
            self._next_pauses[row] = PAUSES[0]

    def _acceptance(self, rows: IntArray) -> NDArray[np.float64]:
        """Return the estimated probability that a draft token of each row is kept, if all before it are."""
        accepted, rejected = self._counts[rows].T
        return np.asarray(accepted / (accepted + rejected))

    def _best(self, acceptance: NDArray[np.float64], longest: IntArray, num_rows: int) -> IntArray:
        """Return lengths of at most `longest` with the most tokens by cost, where a step has `num_rows` without."""
        places = np.arange(1, max(longest.max(initial=0), 1) + 1)
        gains = np.where(places <= longest[:, None], acceptance[:, None] ** places, 0.0)  # [num, places]
        order = np.argsort(-gains, axis=None, kind="stable")[: np.count_nonzero(gains)]
        num_tokens = num_rows + np.cumsum(gains.ravel()[order])
        costs = self._cost(num_rows + np.arange(1, len(order) + 1))
        costs += self._cost.draft_cost * np.maximum.accumulate(places[order % len(places)])
        rates = np.concatenate([num_rows / self._cost(np.array([num_rows])), num_tokens / costs])
        chosen = order[: rates.argmax()] // len(places)
        return np.bincount(chosen, minlength=len(longest))
