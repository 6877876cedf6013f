"""Lengths of drafts by rows, acceptance and the cost of a step, and pauses of rows."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import numpy as np
import pytest

from quire.execution.batch import IntArray, StepInputs
from quire.execution.drafter import DraftRows
from quire.execution.drafting.drafters import (
    MIN_GAIN,
    PAUSES,
    PRODUCTS_PER_BYTE,
    AdaptiveLength,
    LookupDrafter,
    StepCost,
)
from quire.execution.drafting.lookups import NgramLookup
from quire.model.config import ExpertReads

MAX_DRAFTS = 8
COST = StepCost.of("avx512_bf16", 2.0)


def limits(
    lengths: AdaptiveLength, rows: list[int], longest: int = MAX_DRAFTS, num_rows: int | None = None
) -> list[int]:
    found: IntArray = lengths.limits(
        np.array(rows), np.full(len(rows), longest), len(rows) if num_rows is None else num_rows
    )
    return [int(each) for each in found]


def taught(rate: float, cost: StepCost = COST, num_rows: int = 1) -> AdaptiveLength:
    """Return lengths after drafts in every row, with tokens that were accepted with probability `rate`."""
    lengths, rng = AdaptiveLength(cost, num_rows), random.Random(0)
    for row in range(num_rows):
        for _ in range(30):
            accepted = next((i for i in range(4) if rng.random() >= rate), 4)
            lengths.record(row, 4, accepted)
    return lengths


def test_drafts_are_longer_the_more_of_them_are_kept() -> None:
    found = [limits(taught(rate), [0])[0] for rate in (0.05, 0.5, 0.8, 1.0)]
    assert found == sorted(found)
    assert found[0] <= 1 < found[1] < found[3] == MAX_DRAFTS


def test_lengths_are_those_of_most_tokens_by_cost() -> None:
    """For one row, compared with every possible length."""
    for rate in (0.1, 0.3, 0.6, 0.9):
        for kernels, bytes_per_weight in (("avx2", 2.0), ("avx512_bf16", 0.6), ("amx", 2.0)):
            cost = StepCost.of(kernels, bytes_per_weight, draft_cost=0.1)
            lengths = taught(rate, cost)
            acceptance = float(lengths._acceptance(np.array([0]))[0])
            tokens = [sum(acceptance**i for i in range(length + 1)) for length in range(MAX_DRAFTS + 1)]
            passes = [max(length, 1) for length in range(MAX_DRAFTS + 1)]  # the draft model's
            costs = [float(cost(np.array([1 + i]))[0]) + 0.1 * (num - 1) for i, num in enumerate(passes)]
            rates = [each / own for each, own in zip(tokens, costs, strict=True)]
            pays = max(rates) > MIN_GAIN * rates[0]
            assert limits(lengths, [0]) == [rates.index(max(rates)) if pays else 0], (rate, kernels)


@pytest.mark.parametrize("kernels", [name for name in PRODUCTS_PER_BYTE if name not in ("amx", "cuda")])
@pytest.mark.parametrize("bytes_per_weight", [4.0, 2.0, 1.03, 0.55])
def test_many_rows_are_bound_by_arithmetic_and_have_no_drafts(kernels: str, bytes_per_weight: float) -> None:
    lengths = taught(0.8, StepCost.of(kernels, bytes_per_weight), num_rows=64)
    assert limits(lengths, list(range(64))) == [0] * 64


def test_rows_that_have_no_drafts_count_in_the_cost() -> None:
    assert limits(taught(0.9), [0])[0] > limits(taught(0.9), [0], num_rows=16)[0]


def test_row_with_the_better_past_gets_the_drafts() -> None:
    lengths = AdaptiveLength(StepCost(4.0), 2)
    for _ in range(8):
        lengths.record(0, 4, 1)
        lengths.record(1, 4, 4)
    worse, better = limits(lengths, [0, 1])
    assert worse < better


def test_no_more_than_there_are() -> None:
    lengths = taught(1.0, num_rows=3)
    assert lengths.limits(np.array([0, 1, 2]), np.array([3, 0, 1]), 3).tolist() == [3, 0, 1]
    assert lengths.limits(np.array([], dtype=np.int64), np.array([], dtype=np.int64), 5).tolist() == []


def mean_cost(cost: StepCost, step_costs: Sequence[float], acceptance: float, num_tokens: int, seed: int = 0) -> float:
    """Return the cost of a token of a row by that without drafts, its first `num_tokens` simulated.

    `step_costs`: by the number of drafts, from 0. Each draft token is right with probability `acceptance`.
    """
    lengths, rng, total, known = AdaptiveLength(cost, 1), random.Random(seed), 0.0, 0
    while known < num_tokens:
        (length,) = limits(lengths, [0], min(MAX_DRAFTS, num_tokens - known - 1))
        total += step_costs[length] / step_costs[0]
        accepted = next((i for i in range(length) if rng.random() >= acceptance), length)
        if length:
            lengths.record(0, length, accepted)
        known += 1 + accepted
    return total / num_tokens


# ms of a step with 0 to 8 drafts and int4 weights, by the table of docs/speculation.md; those between are the larger
# neighbour's. 1 and 2 drafts are the loudest of it, and cost less on a quiet machine.
MEASURED_INT4 = [29.9, 38.7, 38.7, 47.5, 47.5, 80.0, 80.0, 80.0, 80.0]


@pytest.mark.parametrize("num_tokens", [64, 128, 300])
@pytest.mark.parametrize("bytes_per_weight", [4.0, 2.0, 1.03, 0.57])
@pytest.mark.parametrize("kernels", PRODUCTS_PER_BYTE)
def test_drafts_that_are_always_wrong_cost_less_than_three_percent(
    kernels: str, bytes_per_weight: float, num_tokens: int
) -> None:
    cost = StepCost.of(kernels, bytes_per_weight)
    step_costs = cost(np.arange(1, MAX_DRAFTS + 2)).tolist()
    assert 1.0 <= mean_cost(cost, step_costs, 0.0, num_tokens) < 1.03


def test_wrong_drafts_with_int4_weights_cost_less_than_three_percent_of_the_first_tokens_as_measured() -> None:
    cost = StepCost.of("avx512_bf16", 0.57)
    assert mean_cost(cost, MEASURED_INT4, 0.0, 64) < 1.03


def test_machine_with_faster_memory_than_the_constants_loses_little_and_keeps_the_gain() -> None:
    """Five rows of bfloat16 cost 1.43 on a Zen 5, by its speed with four drafts that are always wrong."""
    cost, measured = StepCost.of("avx512_bf16", 2.0), StepCost(rows_per_read=5 / (1.43**2 - 1) ** 0.5)
    step_costs = measured(np.arange(1, MAX_DRAFTS + 2)).tolist()
    assert mean_cost(cost, step_costs, 0.0, 64) < 1.015
    gains = [1 / mean_cost(cost, step_costs, 0.75, 64, seed) for seed in range(40)]
    assert sum(gains) / len(gains) > 2.0


@pytest.mark.parametrize("bytes_per_weight", [2.0, 1.03, 0.57])
@pytest.mark.parametrize(("acceptance", "gain"), [(0.5, 1.2), (0.75, 1.7), (0.9, 2.2), (1.0, 2.7)])
def test_short_first_drafts_and_pauses_leave_most_of_the_gain(
    bytes_per_weight: float, acceptance: float, gain: float
) -> None:
    cost = StepCost.of("avx512_bf16", bytes_per_weight)
    step_costs = cost(np.arange(1, MAX_DRAFTS + 2)).tolist()
    found = [1 / mean_cost(cost, step_costs, acceptance, 64, seed) for seed in range(20)]
    assert sum(found) / len(found) > gain


def test_new_row_begins_with_as_many_drafts_as_cost_little() -> None:
    firsts = [
        limits(AdaptiveLength(StepCost.of(kernels, bytes_per_weight), 1), [0], 16)[0]
        for kernels, bytes_per_weight in (("avx2", 0.57), ("avx512_bf16", 0.57), ("avx512_bf16", 2.0), ("amx", 2.0))
    ]
    assert firsts == [1, 1, 1, 7]
    lengths = AdaptiveLength(StepCost.of("avx512_bf16", 0.57), 1)
    lengths.record(0, 1, 1)
    assert limits(lengths, [0])[0] > 1


def test_row_whose_drafts_are_all_rejected_pauses_ever_longer_and_tries_again() -> None:
    lengths, tried = AdaptiveLength(COST, 1), []
    for step in range(2000):
        (length,) = limits(lengths, [0])
        if length:
            tried.append(step)
            lengths.record(0, length, 0)
    pauses = [int(gap) - 1 for gap in np.diff(tried) if gap > 1]
    assert [pause // PAUSES[0] for pause in pauses[:5]] == [1, 2, 4, 8, 16]
    assert set(pauses[5:]) == {pauses[-1]}
    assert pauses[-1] >= PAUSES[1]
    assert len([step for step in tried if step >= 1000]) < 150


def test_row_of_which_one_in_four_is_kept_goes_on() -> None:
    lengths, rng, num_drafted = AdaptiveLength(COST, 1), random.Random(1), 0
    for _ in range(200):
        (length,) = limits(lengths, [0])
        num_drafted += bool(length)
        if length:
            lengths.record(0, length, next((i for i in range(length) if rng.random() >= 0.25), length))
    assert num_drafted > 150


def test_one_kept_draft_ends_the_growth_of_pauses() -> None:
    lengths = AdaptiveLength(COST, 1)
    lengths._next_pauses[0] = PAUSES[1]
    lengths.record(0, 4, 1)
    assert lengths._next_pauses[0] == PAUSES[0]


def test_new_owner_of_a_row_starts_anew() -> None:
    lengths = AdaptiveLength(COST, 2)
    fresh = limits(lengths, [0])
    for _ in range(50):
        lengths.record(0, 4, 0)
    assert limits(lengths, [0]) == [0]
    lengths.reset([0])
    assert limits(lengths, [0]) == fresh != [0]


def test_estimates_forget() -> None:
    """A row with rejected drafts gets drafts again once they would be accepted."""
    lengths = taught(0.2)
    before = limits(lengths, [0])[0]
    for _ in range(8):
        lengths.record(0, 4, 4)
    assert limits(lengths, [0])[0] > before


def test_cost_grows_with_rows_and_falls_with_better_kernels() -> None:
    rows = np.arange(1, 100)
    for bytes_per_weight in (2.0, 1.03, 0.55):
        costs = [StepCost.of(name, bytes_per_weight)(rows) for name in ("portable", "avx2", "avx512_bf16", "amx")]
        assert all((np.diff(each) > 0).all() for each in costs)
        assert all((worse > better).all() for worse, better in pairwise(costs))


def test_nothing_is_looked_up_for_many_rows() -> None:
    """Even drafts that are all accepted cannot speed up their step; they can that of one row."""
    for kernels in PRODUCTS_PER_BYTE:
        for bytes_per_weight in (4.0, 2.0, 1.03, 0.55):
            lengths = AdaptiveLength(StepCost.of(kernels, bytes_per_weight), 1)
            may_pay = [lengths.may_pay(num_rows) for num_rows in range(1, 1000)]
            assert may_pay[0]
            assert not may_pay[-1]
            assert all(fewer >= more for fewer, more in pairwise(may_pay))
    batch = np.tile(np.arange(7, dtype=np.int32), (64, 20))
    drafter = LookupDrafter(NgramLookup(batch, 4, 2, 5), AdaptiveLength(COST, 64))
    for num_rows, num_found in ((1, 1), (64, 0)):
        rows, last = np.arange(num_rows), np.full(num_rows, 99)
        assert len(drafter.draft(DraftRows(rows, last, last), cast("StepInputs", None))) == num_found


def test_experts_that_more_rows_read_make_drafts_shorter() -> None:
    """128 experts of which a row uses 8: five rows read up to five times as many, most of the weights being theirs."""
    dense = StepCost.of("avx512_bf16", 0.57)
    mixture = StepCost.of("avx512_bf16", 0.57, experts=ExpertReads(128, 8, 0.7, 3 * 10**9))
    rows = np.array([1, 2, 5, 64])
    assert mixture(rows)[0] == pytest.approx(dense(rows)[0])
    assert (mixture(rows)[1:3] > 1.3 * dense(rows)[1:3]).all()
    assert mixture(rows)[2] < 5 * mixture(rows)[0]
    for rate in (0.5, 0.8, 0.9):
        assert limits(taught(rate, mixture), [0])[0] < limits(taught(rate, dense), [0])[0]
    gains = [cost(np.array([1]))[0] / (cost(np.array([10**6]))[0] / 10**6) for cost in (dense, mixture)]
    assert dense.most_gain(1) == pytest.approx(gains[0])
    assert mixture.most_gain(1) >= gains[1]
