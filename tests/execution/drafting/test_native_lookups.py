"""Lookups of drafts: in C++ they find what their plain forms find, and drafters never ask for beams or full steps."""

from typing import cast

import numpy as np
import pytest

from quire.core.plan import NewRow, StepPlan
from quire.core.pooling import Scope
from quire.core.sampling_params import BeamSearchParams, SamplingParams
from quire.core.speculation import SpeculationConfig
from quire.execution.batch import IntArray, PersistentBatch, StepInputs
from quire.execution.drafter import DraftRows
from quire.execution.drafting.drafters import AdaptiveLength, Lookup, LookupDrafter, StepCost, make_lookup
from quire.execution.drafting.lookups import ScopedLookup, SuffixRules, SuffixTexts
from quire.extension.isas import usable_isas

NUM_ROWS = 6
SETTINGS = [
    SpeculationConfig("ngram", 4), SpeculationConfig("ngram", 16, None, 1, 1),
    SpeculationConfig("ngram", 3, None, 1, 9), SpeculationConfig("ngram", 8, None, 4, 7),
    SpeculationConfig("suffix", 16), SpeculationConfig("suffix", 3),
]  # fmt: skip
needs_kernels = pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")


def both_lookups(config: SpeculationConfig, batch: PersistentBatch) -> list[Lookup]:
    """Return the plain lookup and that in C++, with few and short texts."""
    if config.method == "ngram":
        return [make_lookup(config, batch, is_native=is_native) for is_native in (False, True)]
    from quire.kernels.cpp import lookup

    asked = batch.token_ids, config.num_speculative_tokens, SuffixRules(num_texts=3, max_text=400)
    return [ScopedLookup(texts, 3) for texts in (SuffixTexts(*asked), lookup.CppSuffixTexts(*asked))]


@needs_kernels
@pytest.mark.parametrize("kinds", [2, 5, 40, 30_000])
@pytest.mark.parametrize("config", SETTINGS, ids=lambda each: f"{each.method} {each.num_speculative_tokens}")
def test_lookups_in_cpp_find_what_the_plain_ones_find(config: SpeculationConfig, kinds: int) -> None:
    """Streams of random tokens, some of them copied from earlier ones, in rows whose owners and scopes change."""
    rng = np.random.default_rng(kinds)
    batch = PersistentBatch(NUM_ROWS, 300, 16, 1000)
    batch.token_ids[:] = rng.integers(0, kinds, batch.token_ids.shape)
    lookups = both_lookups(config, batch)
    lengths, seen, num_drafts = np.zeros(NUM_ROWS, dtype=np.int64), list[list[int]](), 0
    for step in range(600):
        for row in range(NUM_ROWS):
            if lengths[row] == 0 or rng.random() < 0.01 or lengths[row] > 290:
                seen.append(batch.token_ids[row, : lengths[row]].tolist())
                known = int(rng.integers(1, 60))
                batch.token_ids[row] = rng.integers(0, kinds, 300)
                lengths[row] = known
                scope = Scope(str(rng.integers(0, 5)))
                new = NewRow(row, batch.token_ids[row, :known].tolist(), known, [], SamplingParams(), 0, scope=scope)
                for each in lookups:
                    each.reset(new)
            source = seen[rng.integers(len(seen))]
            if source and rng.random() < 0.2:
                first = rng.integers(len(source))
                copied = source[first : first + min(40, 300 - lengths[row])]
                batch.token_ids[row, lengths[row] : lengths[row] + len(copied)] = copied
        rows = np.flatnonzero(rng.random(NUM_ROWS) < 0.8)
        lengths[rows] = np.minimum(lengths[rows] + rng.integers(1, 4 if step % 9 else 30, len(rows)), 300)
        plain, native = (each.draft(rows, lengths[rows] - 1) for each in lookups)
        assert native == plain
        assert list(native) == list(plain)
        num_drafts += len(native)
    assert num_drafts > 30


@needs_kernels
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_lookups_refuse_other_arrays_than_of_rows(method: str) -> None:
    own = make_lookup(SpeculationConfig(method), PersistentBatch(2, 64, 16, 100), is_native=True)  # type: ignore[arg-type]
    one = np.array([0])
    for rows, last in ((one, np.array([1, 2])), (one.astype(np.int32), one), (one[None], one[None])):
        with pytest.raises(ValueError, match="position"):
            own.draft(rows, last)
    with pytest.raises(ValueError, match="contiguous"):
        own.draft(np.arange(4)[::2], np.arange(4)[::2])


NO_STEP = cast("StepInputs", None)  # lookups read no tensors of a step


class Asked:
    """A lookup that finds one token for each row."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def reset(self, new: NewRow) -> None:
        """Do nothing."""

    def draft(self, rows: IntArray, last: IntArray) -> dict[int, list[int]]:
        self.rows = rows.tolist()
        return {row: [position] for row, position in zip(rows.tolist(), last.tolist(), strict=True)}


def test_beams_have_no_drafts_and_their_rows_have_again_with_another_owner() -> None:
    lookup = Asked()
    drafter = LookupDrafter(lookup, AdaptiveLength(StepCost(1e9), 4))
    beam = NewRow(1, [1], 1, [], SamplingParams(), 0, beam=BeamSearchParams(beam_width=2, max_tokens=5))
    asked = DraftRows(np.array([0, 1, 3]), np.array([7, 8, 9]), np.array([7, 8, 9]))
    drafter.apply(StepPlan(new_rows=[NewRow(0, [1], 1, [], SamplingParams(), 0), beam]))
    assert drafter.draft(asked, NO_STEP) == {0: [7], 3: [9]}
    assert lookup.rows == [0, 3]
    drafter.apply(StepPlan(new_rows=[NewRow(1, [1], 1, [], SamplingParams(), 0)]))
    assert drafter.draft(asked, NO_STEP) == {0: [7], 1: [8], 3: [9]}
