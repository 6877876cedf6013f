"""Prices of a step, and the longest chunk that a time has room for."""

import random

import pytest

from quire.core.step_times import StepTimes, StepWork, chunk_work


def test_work_of_a_chunk_counts_the_pairs_of_each_query() -> None:
    assert chunk_work(10, 3) == StepWork(3, 11 + 12 + 13, 13)
    assert chunk_work(10, 3, 2) == StepWork(1, 11 + 12 + 13, 13, 2)
    assert chunk_work(10, 0) == StepWork()
    whole, parts = chunk_work(0, 9), chunk_work(0, 4) + chunk_work(4, 5)
    assert whole[:2] == parts[:2]


@pytest.mark.parametrize("seed", range(40))
def test_most_tokens_is_the_longest_chunk_that_fits(seed: int) -> None:
    rng = random.Random(seed)
    token_s, attended_s, context_s = (rng.choice([0.0, 10 ** rng.uniform(-7, -2)]) for _ in range(3))
    times = StepTimes(0.02, token_s or 1e-4, attended_s, context_s, 0.0)
    for _ in range(50):
        start, seconds = rng.choice([0, 1, 100, 20_000]), 10 ** rng.uniform(-4, 1)
        most = times.most_tokens(start, seconds)

        def added_s(num_tokens: int, start: int = start) -> float:
            return times.seconds(chunk_work(start, num_tokens)) - times.step_s

        assert added_s(most) <= seconds * (1 + 1e-9) or most == 0
        assert added_s(most + 1) >= seconds * (1 - 1e-9)


def test_tokens_that_cost_nothing_have_no_limit() -> None:
    assert StepTimes(0.02, 0.0, 0.0, 0.0, 0.0).most_tokens(100, 0.5) > 1_000_000
    assert StepTimes(0.02, 0.0, 0.0, 0.0, 0.0).most_tokens(100, 0.0) == 0
