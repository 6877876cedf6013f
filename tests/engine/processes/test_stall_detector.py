"""A layer that takes long is in time as long as its work explains that."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest

from quire.core.image_processing import PreparedImage
from quire.core.images import PromptImage
from quire.core.plan import StepPlan
from quire.engine.assembly import AssembledEngine
from quire.engine.processes import engine_process as process
from quire.engine.processes.liveness import FLOOR_FLOPS_PER_S, LATE_FACTOR, MIN_MEASURED_S, LayerCost, StallDetector

COST = LayerCost(per_token=1e6, per_pair=1e3)
LONG = StepPlan(starts=[0], counts=[16_000])
SHORT = StepPlan(starts=[16_000], counts=[1])


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_cost_counts_tokens_and_pairs() -> None:
    assert COST.of(StepPlan(starts=[0, 10], counts=[4, 1])) == 5 * 1e6 + (4 * 4 + 11) * 1e3


def test_first_layer_of_a_long_step_may_take_what_any_cpu_takes(clock: Clock) -> None:
    detector = StallDetector(COST, 1, clock)
    longest_s = COST.of(LONG) / FLOOR_FLOPS_PER_S
    assert longest_s > 60, "much longer than a stall limit of a second"
    detector.begin_step(LONG)
    clock.now_s += longest_s * 0.99
    assert detector.is_on_time(0)
    clock.now_s += longest_s * 0.02
    assert not detector.is_on_time(0)


def test_layers_set_the_pace_for_those_after_them(clock: Clock) -> None:
    detector = StallDetector(COST, 1, clock)
    detector.begin_step(LONG)
    for layer in range(1, 4):
        clock.now_s += 2.5
        assert detector.is_on_time(layer)
    clock.now_s += 2.5 * LATE_FACTOR * 0.99
    assert detector.is_on_time(3), "slower than before, and not late yet"
    clock.now_s += 2.5 * LATE_FACTOR * 0.02
    assert not detector.is_on_time(3)
    assert detector.is_on_time(4)


def test_an_image_may_take_what_its_encoder_takes(clock: Clock) -> None:
    cost = replace(COST, of_image=lambda num_tokens: 1e9 * num_tokens)
    image = PromptImage(0, 100, 0, PreparedImage(1, 1, (10, 10), b""))
    step = StepPlan(starts=[0], counts=[4], encodings=[image])
    assert cost.of(step) == 1e11
    assert cost.of(StepPlan(starts=[0], counts=[4])) == COST.of(step)
    detector = StallDetector(cost, 1, clock)
    detector.begin_step(step)
    clock.now_s += 1e11 / FLOOR_FLOPS_PER_S * 0.99
    assert detector.is_on_time(0)
    clock.now_s += MIN_MEASURED_S
    assert detector.is_on_time(1)
    clock.now_s += 1e11 / FLOOR_FLOPS_PER_S * 0.99
    assert detector.is_on_time(1), "a rate of layers of two kinds is none"
    clock.now_s += 1e11 / FLOOR_FLOPS_PER_S * 0.02
    assert not detector.is_on_time(1)


def test_short_step_that_hangs_is_late_at_once(clock: Clock) -> None:
    detector = StallDetector(COST, 1, clock)
    detector.begin_step(LONG)
    clock.now_s += 2.5
    assert detector.is_on_time(1)
    detector.begin_step(SHORT)
    clock.now_s += 0.25
    assert not detector.is_on_time(1)


def test_layers_too_short_to_be_measured_leave_the_rate_alone(clock: Clock) -> None:
    detector = StallDetector(COST, 1, clock)
    detector.begin_step(SHORT)
    clock.now_s += MIN_MEASURED_S / 2
    assert detector.is_on_time(10**6)
    detector.begin_step(LONG)
    clock.now_s += COST.of(LONG) / FLOOR_FLOPS_PER_S / 2
    assert detector.is_on_time(10**6), "still by the rate that every CPU reaches"


def test_nothing_is_expected_without_a_plan(clock: Clock) -> None:
    detector = StallDetector(COST, 8, clock)
    clock.now_s += 1
    assert not detector.is_on_time(0)


def test_engine_is_expected_to_have_the_speed_of_its_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several engines, or the ranks of one, divide the CPUs of a machine."""
    made, detector_of = list[int](), process.StallDetector

    def recorded(cost: LayerCost, num_threads: int, clock: Callable[[], float]) -> StallDetector:
        made.append(num_threads)
        return detector_of(cost, num_threads, clock)

    monkeypatch.setattr(process, "StallDetector", recorded)
    monkeypatch.setattr(process, "threads_of_kernels", lambda: 3)
    model = SimpleNamespace(progress=[0], device="cpu", layer_flops=(1.0, 1.0))
    heartbeat = process._make_heartbeat(cast("AssembledEngine", SimpleNamespace(model=model, engine=Mock())), Mock())
    assert heartbeat is not None
    assert made == [3]
