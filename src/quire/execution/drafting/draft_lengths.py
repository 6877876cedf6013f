"""Lengths of drafts: the number of draft tokens of each row, from the acceptance of its earlier drafts.

A draft token is accepted with the probability a ** p: a is the row's acceptance rate, p the token's position in the
draft, from 1. The likeliest draft tokens of all rows are chosen, as many as maximize the expected tokens of the step
divided by its cost (compare Leviathan et al. 2023, section 3.5, for one row). With many rows there are none: then a
further row costs about as much as a token is worth.

A row begins with a short draft, since nothing is known of its acceptance rate. With too low a rate for any draft token
it pauses, each time twice as long, and then tries again. All of it is computed from counts of tokens, never from time.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.core.speculation import MAX_DRAFTS
from quire.execution.batch import IntArray
from quire.model.weight_counts import ExpertReads

# Products that take as long as reading one byte: of floats, of integers of 8 bits, and of 4. One thread of a Zen 4 for
# all but amx and cuda: docs/speculation.md has its step times, docs/kernels.md its rates. More cores on one memory have
# more. 4 bits with VNNI are by its speeds of decoding: five rows take 1.62 to 1.89 times as long as one, median 1.69.
PRODUCTS_PER_BYTE = {
    "portable": (0.5, 0.5, 0.5), "avx2": (1.6, 2.4, 2.4), "avx512": (2.1, 3.5, 3.5), "avx512_vnni": (2.1, 8.0, 6.3),
    "avx512_bf16": (4.0, 8.0, 6.3), "amx": (14.0, 12.0, 12.0), "cuda": (60.0, 60.0, 60.0),
}  # fmt: skip
# Weights of fewer bytes, their scales included, are integers, and of 4 bits.
_INTEGER_BYTES, _HALF_BYTES = 1.5, 0.8


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost of a step, in units of reading all weights once.

    `rows_per_read`: number of rows with products that take as long as that. `draft_cost`: of one forward pass of a
    draft model, in the same unit; k drafts take k passes, and no drafts one. Of a model with `experts` the unit is
    reading the weights of one row, and more rows read more of them.
    """

    rows_per_read: float
    draft_cost: float = 0.0
    experts: ExpertReads | None = None

    @classmethod
    def of(
        cls, kernels: str, bytes_per_weight: float, draft_cost: float = 0.0,
        experts: ExpertReads | None = None,
    ) -> "StepCost":  # fmt: skip
        """Return the cost with an instruction set, or `cuda`; another name counts as `portable`."""
        rates = PRODUCTS_PER_BYTE.get(kernels, PRODUCTS_PER_BYTE["portable"])
        rate = rates[(bytes_per_weight < _INTEGER_BYTES) + (bytes_per_weight < _HALF_BYTES)]
        return cls(rate * bytes_per_weight, draft_cost, experts)

    def __call__(self, num_rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the cost of a step with each number of rows, with one pass of the draft model."""
        return np.hypot(self._read(num_rows), num_rows / self.rows_per_read) + self.draft_cost

    def most_gain(self, num_rows: int) -> float:
        """Return an upper bound on the speedup by drafts, a factor of at least 1, in a step of `num_rows` rows.

        It is reached by drafts of unlimited length that are all accepted: then only the products cost anything.
        """
        return math.hypot(1.0, float(self._read(np.array([num_rows]))[0]) * self.rows_per_read / num_rows)

    def _read(self, num_rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the weights that a step with each number of rows reads, by those of one row."""
        return np.ones(len(num_rows)) if self.experts is None else self.experts.weights(num_rows)


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
