"""Requests know what they have waited for, and what it took them to come back."""

import pytest

from quire.core.deltas import WAIT_REASONS
from quire.core.sequence import Request
from support.scheduling import Harness


def waited(request: Request) -> dict[str, int]:
    """Return the steps that a request was kept out of, by reason."""
    return {reason: count for reason, count in zip(WAIT_REASONS, request.waited, strict=True) if count}


def steps_until_let_in(harness: Harness, request: Request) -> int:
    num_steps = 0
    while request not in harness.scheduler.step.admitted:
        harness.step()
        num_steps += 1
    return num_steps - 1  # the last one ran it


def test_who_runs_at_once_has_waited_for_nothing() -> None:
    harness = Harness(16)
    request = harness.add(8, max_tokens=2)
    assert steps_until_let_in(harness, request) == 0
    assert waited(request) == {}
    assert harness.scheduler.queues.wait_reasons.current is None
    harness.run()


def test_seats_are_waited_for() -> None:
    harness = Harness(64, max_num_seqs=2)
    harness.add(8, n=2, max_tokens=5, ignore_eos=True)
    second, third = (harness.add(4, max_tokens=1) for _ in range(2))
    harness.step()
    assert harness.scheduler.queues.wait_reasons.current == "max_num_seqs"
    num_steps = 1 + steps_until_let_in(harness, second)
    assert waited(second) == {"max_num_seqs": num_steps}
    assert third in harness.scheduler.step.admitted
    assert waited(third) == waited(second), "what keeps out the first keeps out all behind it"
    harness.run()


def test_blocks_are_waited_for() -> None:
    harness = Harness(8)
    harness.add(20, max_tokens=5, ignore_eos=True)
    second = harness.add(12, max_tokens=5)
    assert (num_steps := steps_until_let_in(harness, second)) > 2
    assert waited(second) == {"token_budget": 1, "kv_blocks": num_steps - 1}, "16 of 20 tokens fill the first step"
    harness.run()


def test_a_full_step_is_waited_for() -> None:
    harness = Harness(64, budget=4)
    harness.add(14, max_tokens=2)
    second = harness.add(4, max_tokens=2)
    assert steps_until_let_in(harness, second) == 3
    assert waited(second) == {"token_budget": 3}
    harness.run()


def test_who_waits_for_its_prefix_waits_alone() -> None:
    harness = Harness(64, caching=True, budget=64)
    prompt = list(range(12))
    harness.add(prompt, max_tokens=2)
    same, other = harness.add(prompt, max_tokens=2), harness.add(4, max_tokens=2)
    harness.step()
    assert harness.scheduler.queues.wait_reasons.current == "pending_prefix"
    assert steps_until_let_in(harness, same) == 0
    assert waited(same)["pending_prefix"] == 1
    assert waited(other) == {}
    harness.run()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_victim_knows_what_its_return_took(mode: str) -> None:
    harness = Harness(12, mode=mode, num_swap_blocks=100)  # type: ignore[arg-type]
    harness.add(8, max_tokens=30, ignore_eos=True)
    victim = harness.add(8, max_tokens=30, ignore_eos=True)
    while not harness.scheduler.step.preempted:
        harness.step()
    assert harness.scheduler.step.preempted == [victim.request_id]
    num_computed = max(victim.live[0].num_computed_tokens, victim.live[0].num_lost_tokens)
    late = harness.add(4, max_tokens=1)
    num_steps = 1 + steps_until_let_in(harness, victim)
    reason = "swapped_first" if mode == "swap" else "kv_blocks"
    assert waited(victim) == {reason: num_steps}
    if mode == "swap":
        assert victim.num_swapped_blocks == 2 * harness.cache.blocks_for(num_computed)
        assert victim.num_recomputed_tokens == 0
        while late not in harness.scheduler.step.admitted:
            harness.step()
        assert waited(late)["swapped_first"] == num_steps - 1
    else:
        assert (victim.num_recomputed_tokens, victim.num_swapped_blocks) == (num_computed, 0)
    harness.run()


def test_a_group_tokens_are_counted_when_it_returns() -> None:
    harness = Harness(24, mode="recompute", budget=8)
    harness.add(30, max_tokens=40, ignore_eos=True)
    group = harness.add(20, n=3, max_tokens=12, ignore_eos=True)
    counted = 0
    while harness.scheduler.has_requests:
        harness.step()
        if group in harness.scheduler.step.admitted and group.num_preemptions:
            counted += group.num_recomputed_tokens
    assert group.num_preemptions > 0
    assert counted >= harness.scheduler.preemption.stats.num_recomputed_tokens > 0, "forks to come are counted ahead"
