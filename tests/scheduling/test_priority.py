"""Priorities: order of service and of preemption, and no request waits forever."""

import pytest

from quire.scheduling import waiting_lines
from support.scheduling import Harness


def admitted(harness: Harness) -> list[int]:
    """Step until nothing is left; return the requests in the order in which they were first let in."""
    order: list[int] = []
    while harness.scheduler.has_requests:
        harness.step()
        order += [r.request_id for r in harness.scheduler.step.admitted if r.request_id not in order]
    return order


def test_lower_priority_is_served_first_and_equal_ones_in_order_of_arrival() -> None:
    harness = Harness(num_blocks=100, max_num_seqs=1)
    for priority in (0, 5, -1, 0, 5, -100, -1):
        harness.add(3, max_tokens=2, ignore_eos=True, priority=priority)
    assert admitted(harness) == [5, 2, 6, 0, 3, 1, 4]


def test_one_that_runs_is_not_turned_out_for_a_better_one() -> None:
    harness = Harness(num_blocks=100, max_num_seqs=1)
    first = harness.add(3, max_tokens=8, ignore_eos=True)
    harness.step()
    harness.add(3, max_tokens=8, ignore_eos=True, priority=-100)
    harness.run()
    assert first.num_preemptions == 0
    assert admitted(harness) == []


def test_lowest_in_order_gives_way_though_it_came_first() -> None:
    harness = Harness(num_blocks=12)
    patient = harness.add(8, max_tokens=30, ignore_eos=True, priority=1)
    harness.step()
    urgent = harness.add(8, max_tokens=30, ignore_eos=True)
    harness.run()
    assert patient.num_preemptions > 0
    assert urgent.num_preemptions == 0
    for request in (patient, urgent):
        harness.assert_right(request)


@pytest.mark.parametrize("level", [1, 3])
def test_who_waits_is_overtaken_only_by_those_who_come_in_time(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_lines, "AGEING_STEPS", 10)
    harness = Harness(num_blocks=100, max_num_seqs=1)
    harness.add(3, max_tokens=3, ignore_eos=True)
    patient = harness.add(3, max_tokens=3, ignore_eos=True, priority=level)
    served: dict[int, int] = {}
    for step in range(10 * level + 20):
        harness.add(3, max_tokens=3, ignore_eos=True)      # a seat takes three steps of each: they come faster
        harness.step()
        served |= {request.request_id: step for request in harness.scheduler.step.admitted}
        if step < 10 * level:
            assert patient.request_id not in served, "level by level"
    while patient.request_id not in served:
        harness.step()
        served |= {request.request_id: harness.num_steps for request in harness.scheduler.step.admitted}
    overtook = [number for number in served if number > patient.request_id]
    assert max(overtook) <= patient.request_id + 10 * level + 1


def test_overtaking_is_bounded_for_preempted_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_lines, "AGEING_STEPS", 5)
    harness = Harness(num_blocks=12, max_num_seqs=3)
    patient = harness.add(8, max_tokens=30, ignore_eos=True, priority=4)
    for _ in range(400):
        harness.add(8, max_tokens=12, ignore_eos=True)
        harness.step()
        if (patient.request_id, 0) in harness.reasons:
            break
    assert (patient.request_id, 0) in harness.reasons
    assert patient.num_preemptions > 0
    harness.assert_right(patient)
