"""Prices are learnt from the times of steps, on machines whose speed changes."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from quire.core.step_times import StepTimes, StepWork, chunk_work
from quire.execution.step_timer import StepTimer

TRUE = StepTimes(0.02, 0.0015, 2e-7, 1.5e-7, 0.0015)
MOST_DRAFTS = 4
Entries = list[tuple[int, int]]  # start, and number of tokens: of decodes up to MOST_DRAFTS more than one


def num_samples(count: int) -> int:
    return count if count <= 1 + MOST_DRAFTS else 0


def work_of(entries: Entries) -> StepWork:
    return sum((chunk_work(start, count, num_samples(count)) for start, count in entries), StepWork())


def record(timer: StepTimer, entries: Entries, true: StepTimes = TRUE, factor: float = 1.0) -> float:
    """Record a step; return the predicted seconds before it, divided by the true ones."""
    seconds = true.seconds(work_of(entries)) * factor
    before = timer.times
    starts, counts = np.array(entries).T
    timer.record(starts, starts + counts, sum(map(num_samples, counts)), seconds)
    return 1.0 if before is None else before.seconds(work_of(entries)) / seconds


def decodes(rng: random.Random) -> Entries:
    return [(rng.randrange(4000), 1) for _ in range(rng.randint(1, 8))]


def drafted(rng: random.Random) -> Entries:
    return [(start, 1 + rng.randint(0, MOST_DRAFTS)) for start, _ in decodes(rng)]


def mixed(rng: random.Random) -> Entries:
    return [*decodes(rng), (rng.choice([0, 500, 3000, 12_000]), rng.choice([8, 30, 100, 400]))]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_steps_are_predicted_after_some_of_each_kind(seed: int, noise: float) -> None:
    rng, timer = random.Random(seed), StepTimer()
    ratios = [record(timer, rng.choice([decodes, mixed])(rng), factor=1 + rng.gauss(0, noise)) for _ in range(300)]
    off = sorted(abs(ratio - 1) for ratio in ratios[20:])
    assert off[int(len(off) * 0.9)] < 0.02 + 3 * noise


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("read_s", [0.01, 0.03, 0.1])
@pytest.mark.parametrize("head_s", [0.0, 0.0015])
def test_rows_beside_drafts_are_priced_apart_from_chunks(seed: int, read_s: float, head_s: float) -> None:
    """While the weights are read, the first tokens of a step cost less than those of a chunk, or a head makes up."""
    rng, timer = random.Random(seed), StepTimer()
    off: dict[Callable[[random.Random], Entries], list[float]] = {drafted: [], mixed: []}
    for _ in range(200):
        kind = rng.choice([drafted, drafted, mixed])
        work = work_of(entries := kind(rng))
        read_or_multiplied_s = float(np.hypot(read_s, 0.003 * (work.num_tokens + work.num_samples)))
        seconds = read_or_multiplied_s + head_s * work.num_samples + 2e-7 * work.num_attended
        off[kind].append(abs(record(timer, entries, factor=seconds / TRUE.seconds(work)) - 1))
    for errors in off.values():
        assert sorted(errors[10:])[int(0.9 * len(errors[10:]))] < 0.2


def test_hours_of_decodes_forget_no_prompt() -> None:
    rng, timer = random.Random(1), StepTimer()
    for _ in range(100):
        record(timer, mixed(rng))
    for _ in range(5000):
        record(timer, decodes(rng))
    assert record(timer, mixed(rng)) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_change_of_speed_is_followed_within_ten_steps(factor: float) -> None:
    rng, timer = random.Random(2), StepTimer()
    for _ in range(200):
        record(timer, rng.choice([decodes, mixed])(rng))
    for _ in range(10):
        record(timer, decodes(rng), factor=factor)
    ratios = [record(timer, rng.choice([decodes, mixed])(rng), factor=factor) for _ in range(50)]
    assert all(ratio == pytest.approx(1, abs=0.2) for ratio in ratios)


def test_first_chunk_behind_decodes_alone_is_guessed_on_the_safe_side() -> None:
    rng, timer = random.Random(3), StepTimer()
    for _ in range(20):
        record(timer, decodes(rng))
    assert record(timer, [(0, 200)]) > 0.9


def test_one_slow_step_changes_little() -> None:
    rng, timer = random.Random(4), StepTimer()
    for _ in range(100):
        record(timer, rng.choice([decodes, mixed])(rng))
    record(timer, mixed(rng), factor=50)
    assert record(timer, mixed(rng)) == pytest.approx(1, abs=0.1)


def test_nothing_is_known_before_the_first_step() -> None:
    assert StepTimer().times is None


def test_short_steps_are_fitted_in_lots() -> None:
    timer, fast = StepTimer(), StepTimes(1e-4, 1e-5, 0.0, 0.0, 1e-5)
    for _ in range(20):
        record(timer, [(5, 1)], fast)
        assert timer.times is None
    for _ in range(200):
        record(timer, [(5, 1)], fast)
    assert record(timer, [(5, 1)], fast) == pytest.approx(1, abs=0.05)


def test_times_of_zero_leave_finite_prices() -> None:
    timer = StepTimer()
    for seconds in (0.0, 0.1, 0.0, 5.0, 0.02):
        timer.record(np.array([0, 7]), np.array([1, 30]), 1, seconds)
    assert timer.times is not None
    assert all(np.isfinite(timer.times))
    assert min(timer.times) >= 0
