"""Drafters around a lookup or a draft model, and the one that a configuration asks for."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from quire.core.plan import NewRow, StepPlan
from quire.core.speculation import SpeculationConfig
from quire.execution.batch import IntArray, PersistentBatch, StepInputs
from quire.execution.drafter import Drafter, DraftRows
from quire.execution.drafting.draft_lengths import AdaptiveLength, StepCost
from quire.execution.drafting.draft_model import DraftModel
from quire.execution.drafting.lookups import RULES, NgramLookup, ScopedLookup, SuffixTexts
from quire.kernels.cpp.isas import usable_isas
from quire.model.weight_counts import ExpertReads


class LimitedDrafter:
    """A `Drafter` around a method: beams have no drafts, and the drafts of other rows are as long as `lengths` says."""

    def __init__(
        self, method: DraftModel, lengths: AdaptiveLength, max_drafts: int, batch: PersistentBatch
    ) -> None:
        self._method, self._lengths, self._max_drafts = method, lengths, max_drafts
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
        limits = self._lengths.limits(rows.rows, longest, len(rows.rows))
        drafted = np.flatnonzero(limits)
        return self._method.draft(DraftRows(*(each[drafted] for each in rows)), limits[drafted], step)

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
) -> Drafter:  # fmt: skip
    """Return the drafter for the rows of a batch.

    kernels: the instruction set that computes, or `cuda`; bytes_per_weight: of the model. draft_model: drafter of the
    method `draft_model`; draft_cost: bytes of its weights divided by those that a row of the model reads. experts: as a
    step reads them.
    """
    cost = StepCost.of(kernels, bytes_per_weight, draft_cost, experts)
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
