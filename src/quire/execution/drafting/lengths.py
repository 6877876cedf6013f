"""Lengths of drafts: the number of draft tokens of each row, from the acceptance of its earlier drafts.

A draft token is accepted with the probability a ** p: a is the row's acceptance rate, p the token's position in the
draft, from 1. The likeliest draft tokens of all rows are chosen, as many as maximize the expected tokens of the step
divided by its cost (compare Leviathan et al. 2023, section 3.5, for one row). With many rows there are none: then a
further row costs about as much as a token is worth.

A row begins with a short draft, since nothing is known of its acceptance rate. With too low a rate for any draft token
it pauses, each time twice as long, and then tries again. All of it is computed from counts of tokens, never from time.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from quire.core.speculation import MAX_DRAFTS
from quire.execution.batch import IntArray
from quire.execution.drafting.step_cost import StepCost

PRIOR = np.array([0.6, 0.4])  # accepted and rejected draft tokens that a new row begins with: one in all
RETRY = PRIOR / 8  # the same after a pause: one rejected draft or two begin the next one
# Cost of a step with the first draft of a row or behind a pause, by one without: at most, or one token. Machines with
# one instruction set differ: five rows of bfloat16 cost 1.17 on a Zen 4 and 1.43 on a Zen 5 (docs/speculation.md).
FIRST_COST = 1.04
MIN_GAIN = 1.03  # speedup of the best drafts possible below which nothing is looked up, and nothing drafted
KEPT = 0.875  # share of the counts that remains with each verified draft: about the last eight of them matter
PAUSES = (4, 64)  # drafts that a row skips, in its first pause and at most


class AdaptiveLength:
    """Lengths that maximize the expected tokens of a step divided by its cost."""

    def __init__(self, cost: StepCost, max_rows: int) -> None:
        self._cost = cost
        self._counts = np.tile(PRIOR, (max_rows, 1))  # draft tokens accepted and rejected, by exponential decay
        self._pauses = np.zeros(max_rows, dtype=np.int64)  # drafts still to be skipped
        self._next_pauses = np.full(max_rows, PAUSES[0])
        self._is_untried = np.ones(max_rows, dtype=bool)  # no draft token was accepted since the start or a pause
        nums = np.arange(1, MAX_DRAFTS + 1)
        costs, (alone,) = cost(1 + nums) + cost.draft_cost * (nums - 1), cost(np.array([1]))
        self._first = max(int(np.count_nonzero(costs <= FIRST_COST * alone)), 1)  # most tokens of an untried row

    def reset(self, rows: Iterable[int]) -> None:
        """Forget what was recorded of rows, which have new owners."""
        which = list(rows)
        self._counts[which], self._pauses[which], self._next_pauses[which] = PRIOR, 0, PAUSES[0]
        self._is_untried[which] = True

    def may_pay(self, num_rows: int) -> bool:
        """Return whether drafts, if all are accepted, make a step of `num_rows` sequences more than MIN_GAIN faster."""
        return self._cost.most_gain(num_rows) > MIN_GAIN

    def limits(self, rows: IntArray, longest: IntArray, num_rows: int) -> IntArray:
        """Return how many drafts each of `rows` should have: int64 [num], from 0 to `longest`, int64 [num].

        num_rows: sequences in the step, those without drafts included. Call once for each step. A row that gets none
        because of its acceptance rate begins a pause.
        """
        pauses = self._pauses[rows] > 0
        self._pauses[rows] -= pauses
        acceptance = self._acceptance(rows)
        most = np.where(self._is_untried[rows], np.minimum(longest, self._first), longest)
        lengths = self._best(acceptance, np.where(pauses, 0, most), num_rows)
        hopeless = rows[(lengths == 0) & (acceptance < PRIOR[0] / PRIOR.sum()) & ~pauses & (longest > 0)]
        self._counts[hopeless], self._pauses[hopeless] = RETRY, self._next_pauses[hopeless]
        self._next_pauses[hopeless] = np.minimum(2 * self._next_pauses[hopeless], PAUSES[1])
        self._is_untried[hopeless] = True
        return lengths

    def record(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Count accepted draft tokens, and the rejected one, if any: those behind it were not compared."""
        self._counts[row] = KEPT * self._counts[row] + (num_accepted, num_accepted < num_drafts)
        if num_accepted:
            self._next_pauses[row], self._is_untried[row] = PAUSES[0], False

    def _acceptance(self, rows: IntArray) -> NDArray[np.float64]:
        """Return the estimated probability that a draft token of each row is accepted, if all before it are."""
        accepted, rejected = self._counts[rows].T
        return np.asarray(accepted / (accepted + rejected))

    def _best(self, acceptance: NDArray[np.float64], longest: IntArray, num_rows: int) -> IntArray:
        """Return lengths of at most `longest` with the most tokens by cost; `num_rows`: rows without drafts."""
        places = np.arange(1, max(longest.max(initial=0), 1) + 1)
        gains = np.where(places <= longest[:, None], acceptance[:, None] ** places, 0.0)  # [num, places]
        order = np.argsort(-gains, axis=None, kind="stable")[: np.count_nonzero(gains)]
        num_tokens = num_rows + np.cumsum(gains.ravel()[order])
        costs = self._cost(num_rows + np.arange(1, len(order) + 1))
        costs += self._cost.draft_cost * (np.maximum.accumulate(places[order % len(places)]) - 1)
        rates = np.concatenate([num_rows / self._cost(np.array([num_rows])), num_tokens / costs])
        chosen = order[: rates.argmax() if rates.max() > MIN_GAIN * rates[0] else 0] // len(places)
        return np.bincount(chosen, minlength=len(longest))
