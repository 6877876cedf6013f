"""A long prompt does not stall the rest; counted in steps, each of which takes one chunk's time."""

import math

import pytest

from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.time_budget import ChunkedPrefillBudget, TimeBudget
from support.scheduling import Harness, make_request

BUDGET = 16


def steps_to_first_token(harness: Harness, request: Request) -> int:
    """Step until a request has its first token; return how many steps that took."""
    before = harness.num_steps
    while (request.request_id, 0) not in harness.outputs:
        harness.step()
    return harness.num_steps - before


def finish(harness: Harness) -> None:
    harness.run()
    for request in harness.requests.values():
        harness.assert_right(request)


@pytest.mark.parametrize("num_long", [1, 2, 5])
@pytest.mark.parametrize("caching", [False, True])
def test_short_requests_wait_a_step_or_two_for_their_first_token(num_long: int, caching: bool) -> None:
    harness = Harness(num_blocks=2000, budget=BUDGET, max_num_seqs=32, caching=caching)
    for _ in range(num_long):
        harness.add(1000, max_tokens=3, ignore_eos=True)
    harness.step()
    for _ in range(20):
        assert steps_to_first_token(harness, harness.add(5, max_tokens=2, ignore_eos=True)) == 1
        waiting = [harness.add(5, max_tokens=2, ignore_eos=True) for _ in range(3)]
        assert max(steps_to_first_token(harness, request) for request in waiting) <= 1, "a step more for each"
    assert any(len(request.live) and not request.live[0].num_output_tokens for request in harness.requests.values())
    finish(harness)


def test_long_prompt_has_all_of_the_budget_that_nobody_else_can_use() -> None:
    harness = Harness(num_blocks=400, budget=BUDGET)
    harness.add(10 * BUDGET, max_tokens=1)
    for _ in range(5):
        harness.step()
    late = harness.add(5, max_tokens=4, ignore_eos=True)
    harness.run()
    chunks = [dict(zip(rows, counts, strict=True)) for rows, _, counts, *_ in harness.executor.trace]
    assert [sum(chunk.values()) for chunk in chunks[:10]] == [BUDGET] * 10, "no step has room left"
    assert [chunk.get(0) for chunk in chunks[5:9]] == [BUDGET - 5, *[BUDGET - 1] * 3]
    harness.assert_right(late)


def test_decoding_goes_on_beside_a_long_prompt_that_came_before() -> None:
    harness = Harness(num_blocks=400, budget=BUDGET)
    harness.add(20 * BUDGET, max_tokens=1)
    short = harness.add(3, max_tokens=10, ignore_eos=True)
    assert steps_to_first_token(harness, short) == 1
    before = harness.num_steps
    while (short.request_id, 0) not in harness.reasons:
        harness.step()
    assert harness.num_steps - before == 9, "a token in each step"
    finish(harness)


def test_prompt_that_waits_behind_long_ones_is_found_past_a_few_of_them() -> None:
    harness = Harness(num_blocks=4000, budget=BUDGET, max_num_seqs=32)
    for _ in range(9):
        harness.add(400, max_tokens=1)
    assert steps_to_first_token(harness, harness.add(4, max_tokens=1)) == 1
    harness = Harness(num_blocks=4000, budget=BUDGET, max_num_seqs=32)
    for _ in range(10):
        harness.add(400, max_tokens=1)
    assert steps_to_first_token(harness, harness.add(4, max_tokens=1)) > 1, "a crowd of long ones is a queue"
    finish(harness)


def test_group_with_a_long_prompt_stalls_nobody_either() -> None:
    harness = Harness(num_blocks=2000, budget=BUDGET)
    harness.add(500, max_tokens=5, n=3, ignore_eos=True)
    harness.step()
    for _ in range(5):
        assert steps_to_first_token(harness, harness.add(7, max_tokens=2, ignore_eos=True)) == 1
    finish(harness)


def test_long_prompt_that_is_under_way_keeps_its_room() -> None:
    """Requests that are admitted beside it leave it the blocks of its prompt: else three of them are preempted."""
    harness = Harness(num_blocks=48, budget=BUDGET, max_num_seqs=32)
    harness.add(160, max_tokens=4, ignore_eos=True)
    harness.step()
    for _ in range(12):
        harness.add(8, max_tokens=12, ignore_eos=True)
        harness.step()
    finish(harness)
    assert harness.scheduler.preemption.stats.num_preemptions == {"recompute": 0, "swap": 0}


def test_budget_of_one_has_no_shares() -> None:
    shares, step = ChunkedPrefillBudget(1, [], list, TimeBudget(math.inf)), PlanBuilder()
    request = make_request(0, [1], SamplingParams())
    assert [shares.share(step, request, missing, 1, 0) for missing in (1, 2)] == [1, 1]
