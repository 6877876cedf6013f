"""The paper's experiments as points: every system is the same engine, and memory is accounted for."""

from pathlib import Path

import pytest

from quire_lab.paper.runs import MAX, ORACLE, PAGED, SYSTEMS, Meter, Point, PointOutcome, latency_curve, run, run_all

NO_DATA = Path("no such folder")  # fits of the lengths: the same numbers everywhere


def point(system: str, rate: float = 8.0, trace_s: float = 4.0) -> Point:
    return Point(system, "OPT-13B", "sharegpt", rate, trace_s, data=NO_DATA)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, PointOutcome]:
    return {system: run(point(system), watches=True) for system in SYSTEMS}


def test_shares_are_of_the_whole_pool(outcomes: dict[str, PointOutcome]) -> None:
    for outcome in outcomes.values():
        if any(outcome.shares[:3]):
            assert sum(outcome.shares) == pytest.approx(1.0)
            assert min(outcome.shares) >= 0


def test_the_longest_length_reserved_leaves_room_for_seven(outcomes: dict[str, PointOutcome]) -> None:
    assert 5 < outcomes[MAX].batched_requests <= 7
    assert outcomes[MAX].shares[2] > 0.4


def test_an_oracle_reserves_nothing_that_is_not_used(outcomes: dict[str, PointOutcome]) -> None:
    assert outcomes[ORACLE].shares[2] == 0.0
    assert outcomes[ORACLE].shares[3] > 0.2, "a buddy allocator rounds up"


def test_systems_stand_in_the_papers_order(outcomes: dict[str, PointOutcome]) -> None:
    latencies = [outcome.latency_s for outcome in outcomes.values()]
    assert latencies[:5] == sorted(latencies[:5], reverse=True)
    assert outcomes[PAGED].num_preemptions == 0 or outcomes[PAGED].batched_requests > 20


def test_whoever_waits_behind_a_static_batch_waits_longest(outcomes: dict[str, PointOutcome]) -> None:
    assert outcomes["FasterTransformer"].latency_s > 1.5 * outcomes[MAX].latency_s


def test_branches_save_what_the_prompt_takes() -> None:
    one = Point(PAGED, "OPT-13B", "alpaca", 2.0, 4.0, data=NO_DATA)
    assert run(one, watches=True).saved == 0.0
    several = run(Point(PAGED, "OPT-13B", "alpaca", 2.0, 4.0, n=4, data=NO_DATA), watches=True)
    assert 0.0 < several.saved < 0.5


def test_a_curve_ends_at_the_first_point_above_the_limit() -> None:
    curve = latency_curve([point(MAX, rate, 2.0) for rate in (0.5, 4.0, 20.0, 40.0)], limit_s=0.1)
    assert len(curve) < 4
    assert curve[-1][1] > 0.1
    assert all(latency_s <= 0.1 for _, latency_s in curve[:-1])


def test_points_run_in_processes_of_their_own_and_come_back_in_order() -> None:
    points = [point(MAX, rate, 1.0) for rate in (2.0, 20.0)]
    assert run_all(points) == [run(each) for each in points]


def test_nothing_counted_saves_nothing() -> None:
    assert Meter().saved == 0.0
