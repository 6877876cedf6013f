"""Drafters around a lookup or a draft model, the one that a configuration asks for, and the lengths of its drafts.

A draft token is accepted with the probability a ** p: a is the row's acceptance rate, p the token's position in the
draft, from 1. The likeliest draft tokens of all rows are chosen, as many as maximize the expected tokens of the step
divided by its cost (compare Leviathan et al. 2023, section 3.5, for one row). With many rows there are none: then a
further row costs about as much as a token is worth.

A row begins with a short draft, since nothing is known of its acceptance rate. With too low a rate for any draft token
it pauses, each time twice as long, and then tries again. All of it is computed from counts of tokens, never from time.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.plan import NewRow, StepPlan
from quire.core.speculation import MAX_DRAFTS, SpeculationConfig
from quire.execution.batch import IntArray, PersistentBatch, StepInputs
from quire.execution.drafter import Drafter, DraftRows
from quire.execution.drafting.draft_model import DraftModel
from quire.execution.drafting.lookups import RULES, NgramLookup, ScopedLookup, SuffixTexts
from quire.extension.isas import usable_isas
from quire.model.config import ExpertReads

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
    draft model, in the same unit; k drafts take k passes, and no drafts one, without its `logits_cost`. Of a model with
    `experts` the unit is reading the weights of one row, and more rows read more of them.
    """

    rows_per_read: float
    draft_cost: float = 0.0
    experts: ExpertReads | None = None
    logits_cost: float = 0.0

    @classmethod
    def of(
        cls, kernels: str, bytes_per_weight: float, draft_cost: float = 0.0,
        experts: ExpertReads | None = None, logits_cost: float = 0.0,
    ) -> "StepCost":  # fmt: skip
        """Return the cost with an instruction set, or `cuda`; another name counts as `portable`."""
        rates = PRODUCTS_PER_BYTE.get(kernels, PRODUCTS_PER_BYTE["portable"])
        rate = rates[(bytes_per_weight < _INTEGER_BYTES) + (bytes_per_weight < _HALF_BYTES)]
        return cls(rate * bytes_per_weight, draft_cost, experts, logits_cost)

    def __call__(self, num_rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the cost of a step with each number of rows, with one pass of the draft model."""
        return np.hypot(self._read(num_rows), num_rows / self.rows_per_read) + self.draft_cost

    def without_drafts(self, num_rows: int) -> float:
        """Return the cost of a step of `num_rows` rows without drafts."""
        return float(self(np.array([num_rows]))[0]) - self.logits_cost

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
        costs, alone = cost(1 + nums) + cost.draft_cost * (nums - 1), cost.without_drafts(1)
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
        rates = np.append(num_rows / self._cost.without_drafts(num_rows), num_tokens / costs)
        chosen = order[: rates.argmax() if rates.max() > MIN_GAIN * rates[0] else 0] // len(places)
        return np.bincount(chosen, minlength=len(longest))


class LimitedDrafter:
    """A `Drafter` around a method: beams have no drafts, and the drafts of other rows are as long as `lengths` says."""

    def __init__(
        self, method: DraftModel, lengths: AdaptiveLength, max_drafts: int, batch: PersistentBatch
    ) -> None:
        self._method, self._lengths, self._max_drafts = method, lengths, max_drafts
        self.reads_hidden = method.reads_hidden
        max_rows, self._max_len = batch.token_ids.shape
        self._is_beam = np.zeros(max_rows, dtype=bool)

    def apply(self, plan: StepPlan) -> None:
        """Reset the state of each new row."""
        for new in plan.new_rows:
            self._is_beam[new.row] = new.beam is not None
        if plan.new_rows:
            self._lengths.reset([new.row for new in plan.new_rows])

    def draft(self, rows: DraftRows, step: StepInputs) -> Mapping[int, Sequence[int]]:
        """Return the method's drafts, with the lengths that the policy chooses."""
        longest = np.clip(self._max_len - rows.num_tokens, 0, self._max_drafts)
        longest[self._is_beam[rows.rows]] = 0
        return self._method.draft(rows, self._lengths.limits(rows.rows, longest, len(rows.rows)), step)

    def record(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Pass the counts of a row's drafts to the policy."""
        self._lengths.record(row, num_drafts, num_accepted)


class Lookup(Protocol):
    """Methods that find drafts among known tokens. They know the tokens of rows and the most tokens of a draft."""

    def reset(self, new: NewRow) -> None:
        """Begin a row with a new sequence. It is the row's owner until the next call."""

    def draft(self, rows: IntArray, last: IntArray) -> dict[int, list[int]]:
        """Return the drafts that were found, by row, in the order of `rows`; last: as in `DraftRows`."""


class LookupDrafter:
    """A `Drafter` around a lookup.

    A lookup costs almost nothing and finds drafts for few rows, so it runs first, and the lengths are chosen for the
    rows that it found drafts for. Beams have no drafts.
    """

    reads_hidden = False

    def __init__(self, lookup: Lookup, lengths: AdaptiveLength) -> None:
        self._lookup, self._lengths = lookup, lengths
        self._beams = set[int]()    # rows

    def apply(self, plan: StepPlan) -> None:
        """Reset the state of each new row."""
        if plan.new_rows:
            self._lengths.reset([new.row for new in plan.new_rows])
            for new in plan.new_rows:
                self._lookup.reset(new)
                (self._beams.discard if new.beam is None else self._beams.add)(new.row)

    def draft(self, rows: DraftRows, _step: StepInputs) -> Mapping[int, Sequence[int]]:
        """Return the drafts that were found, with the lengths that the policy chooses."""
        num_rows = len(rows.rows)
        if not num_rows or not self._lengths.may_pay(num_rows):
            return {}
        if self._beams:
            is_drafted = ~np.isin(rows.rows, list(self._beams))
            rows = DraftRows(*(each[is_drafted] for each in rows))
        found = self._lookup.draft(rows.rows, rows.last)
        return self._cut(found, num_rows) if found else found

    def record(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Pass the counts of a row's drafts to the policy."""
        self._lengths.record(row, num_drafts, num_accepted)

    def _cut(self, found: Mapping[int, Sequence[int]], num_rows: int) -> dict[int, Sequence[int]]:
        """Return drafts cut to the lengths that the policy chooses in a step of `num_rows` rows."""
        rows = np.fromiter(found, dtype=np.int64, count=len(found))
        longest = np.fromiter(map(len, found.values()), dtype=np.int64, count=len(found))
        lengths = self._lengths.limits(rows, longest, num_rows).tolist()
        return {row: drafts[:length] for (row, drafts), length in zip(found.items(), lengths, strict=True) if length}


def make_drafter(
    config: SpeculationConfig, batch: PersistentBatch, kernels: str, bytes_per_weight: float,
    draft_model: DraftModel | None = None, draft_cost: float = 0.0, experts: ExpertReads | None = None,
    logits_cost: float = 0.0,
) -> Drafter:  # fmt: skip
    """Return the drafter for the rows of a batch.

    kernels: the instruction set that computes, or `cuda`; bytes_per_weight: of the model. draft_model: drafter of the
    methods `draft_model` and `mtp`; draft_cost: bytes of weights that its pass reads, divided by those that a row of
    the model reads; logits_cost: the part of them that is read for drafts alone. experts: as a step reads them.
    """
    cost = StepCost.of(kernels, bytes_per_weight, draft_cost, experts, logits_cost)
    lengths = AdaptiveLength(cost, len(batch.token_ids))
    if draft_model is not None:
        return LimitedDrafter(draft_model, lengths, config.num_speculative_tokens, batch)
    return LookupDrafter(make_lookup(config, batch, is_native=bool(usable_isas())), lengths)


def make_lookup(config: SpeculationConfig, batch: PersistentBatch, *, is_native: bool) -> Lookup:
    """Return the lookup of a method, in C++ or in its plain form."""
    tokens, num_drafts = batch.token_ids, config.num_speculative_tokens
    sizes = config.prompt_lookup_min, config.prompt_lookup_max
    if not is_native:
        is_ngram = config.method == "ngram"
        return NgramLookup(tokens, num_drafts, *sizes) if is_ngram else ScopedLookup(SuffixTexts(tokens, num_drafts))
    from quire.kernels.cpp import lookup as native  # noqa: PLC0415 (the extension is optional)

    if config.method == "ngram":
        return native.CppNgramLookup(tokens, num_drafts, *sizes)
    return ScopedLookup(native.CppSuffixTexts(tokens, num_drafts, RULES))
