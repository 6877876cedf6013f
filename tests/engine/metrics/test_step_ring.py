"""The latest steps of an engine: bounded, numbered over all engines, with rates of whole seconds."""

from itertools import count
from typing import Any

import pytest

from quire.core.deltas import SequenceDelta
from quire.core.outputs import KVStats
from quire.core.step_times import StepTiming
from quire.engine.messages import EngineState, Stepped
from quire.engine.metrics import step_ring
from quire.engine.metrics.page import Metrics
from quire.engine.metrics.step_ring import StepRing
from quire.engine.requests.output_processor import ProcessedStep


def kv_stats(hits: int = 0, **counts: Any) -> KVStats:  # noqa: ANN401 (those of KVStats)
    return KVStats(16, 10, 4, 1, 5, 0, 3, 0, prefix_hits_tokens=hits, **counts)


def stepped(
    hits: int = 0, timing: StepTiming | None = None, drafts: tuple[int, int] = (0, 0), **state: Any  # noqa: ANN401
) -> Stepped:  # fmt: skip
    whole = EngineState(2, 3, 0, kv_stats(hits), num_running_seqs=4, **state)
    delta = SequenceDelta(1, 0, [7], num_draft_tokens=drafts[0], num_accepted_tokens=drafts[1])
    return Stepped(10.5, 9, [], [delta], whole, [5], timing)


def test_step_is_recorded_with_what_changed_in_it() -> None:
    ring = StepRing(count())
    ring.record(stepped(64, StepTiming("mixed", 0.02), waits_for="kv_blocks"), ProcessedStep(num_output_tokens=4))
    ring.record(stepped(96, None, drafts=(3, 2)), ProcessedStep())
    assert ring.steps(0) == {
        "number": [0, 1], "start": [10.5, 10.5], "seconds": [0.02, None], "kind": ["mixed", None], "tokens": [9, 9],
        "outputs": [4, 0], "rows": [4, 4], "waiting": [3, 3], "reason": ["kv_blocks", None], "free": [5, 5],
        "cached": [1, 1], "used": [4, 4], "preempted": [1, 1], "hits": [64, 32], "drafts": [0, 3], "accepted": [0, 2],
    }  # fmt: skip


def test_steps_are_numbered_over_all_engines() -> None:
    metrics = Metrics("tiny", num_engines=2)
    metrics.keep_steps()
    first, second = (engine.steps for engine in metrics.engines)
    assert first is not None
    assert second is not None
    for engine in (0, 1, 1, 0):
        metrics.engines[engine].on_step(stepped(), ProcessedStep())
    assert (first.steps(0)["number"], second.steps(0)["number"]) == ([0, 3], [1, 2])
    assert (first.steps(2)["number"], second.steps(2)["number"]) == ([3], [2])
    assert max(first.next, second.next) == 4
    assert first.steps(4)["number"] == []


def test_oldest_steps_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_ring, "NUM_STEPS", 3)
    ring = StepRing(count())
    for num_recorded in range(1, 8):
        ring.record(stepped(), ProcessedStep())
        assert ring.steps(0)["number"] == list(range(num_recorded))[-3:]
    assert ring.steps(6)["number"] == [6]


def test_rates_are_of_whole_seconds() -> None:
    now_s = 100.2
    ring = StepRing(count(), lambda: now_s)
    assert ring.rates()["1"]["steps"] == 0
    for now_s, outputs in ((100.2, 1), (100.9, 2), (101.0, 5), (102.5, 9)):  # noqa: B007 (the ring's clock reads it)
        ring.record(stepped(), ProcessedStep(num_output_tokens=outputs))
    assert {window: rates["output_tokens"] for window, rates in ring.rates().items()} == {
        "1": 5, "10": 0.8, "60": 8 / 60
    }  # fmt: skip
    now_s = 103.0
    assert [ring.rates()["1"][name] for name in ("steps", "output_tokens", "preemptions")] == [1, 9, 1]
    now_s = 162.0
    assert ring.rates()["60"]["steps"] == 1 / 60
    now_s = 163.0
    assert ring.rates()["60"]["steps"] == 0


def test_death_of_the_engine_leaves_its_steps_and_counts_hits_anew() -> None:
    ring = StepRing(count())
    ring.record(stepped(64, shares={"key:1": 3.0}), ProcessedStep())
    ring.engine_died()
    assert (ring.state.num_running, ring.shares) == (0, None)
    ring.record(stepped(16), ProcessedStep())
    assert ring.steps(0)["hits"] == [64, 16]


def test_shares_and_blocks_by_owner_stay_until_they_are_counted_again() -> None:
    ring = StepRing(count())
    ring.set_state(EngineState(0, 0, 0, kv_stats(blocks_by_owner={"key-1": 4}), shares={"key:1": 3.0}))
    ring.record(stepped(), ProcessedStep())
    assert (ring.shares, ring.blocks_by_owner) == ({"key:1": 3.0}, {"key-1": 4})
