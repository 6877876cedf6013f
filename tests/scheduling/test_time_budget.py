"""A step beside a decode is planned to take no longer than the target, by prices that the test sets: no clock runs."""

import math

import pytest

from quire.core.plan import MeasuredRates, StepPlan
from quire.core.sequence import Request
from quire.core.step_times import StepTimes, StepWork, chunk_work
from quire.scheduling.time_budget import TimeBudget
from support.scheduling import Harness

PRICES = StepTimes(step_s=0.02, token_s=0.001, attended_s=1e-6, context_s=1e-6, sample_s=0.001)
BUDGET = 256


def harness_of(target_s: float, prices: StepTimes | None = PRICES, first_s: float = math.inf) -> Harness:
    rates = MeasuredRates(step_times=prices)
    return Harness(
        num_blocks=3000, budget=BUDGET, max_num_seqs=64, rates=rates, itl_target_s=target_s, ttft_target_s=first_s
    )


def seconds_of(plan: StepPlan, prices: StepTimes = PRICES) -> float:
    work = sum((chunk_work(*entry) for entry in zip(plan.starts, plan.counts, strict=True)), StepWork())
    return prices.seconds(work)


def start_streams(harness: Harness, number: int = 4) -> list[Request]:
    streams = [harness.add(4, max_tokens=2000, ignore_eos=True) for _ in range(number)]
    while not all(request.live and request.live[0].num_output_tokens for request in streams):
        harness.step()
    return streams


def run_beside(harness: Harness, request: Request) -> list[StepPlan]:
    """Step until a request has its first token; return the plans."""
    plans = []
    while (request.request_id, 0) not in harness.outputs:
        plans.append(harness.schedule())
        harness.execute(plans[-1])
        harness.now_s += seconds_of(plans[-1])
    return plans


@pytest.mark.parametrize("target_s", [0.05, 0.08, 0.2])
@pytest.mark.parametrize("margin", [1.0, 1.25])
def test_steps_beside_a_stream_are_filled_up_to_the_target(target_s: float, margin: float) -> None:
    harness = harness_of(target_s, PRICES._replace(margin=margin))
    start_streams(harness)
    *full, last = run_beside(harness, harness.add(2000, max_tokens=1))
    longest = PRICES.token_s + 0.003  # one token more at the end of the prompt
    assert all(target_s / margin - longest < seconds_of(plan) <= target_s / margin + 1e-9 for plan in full)
    assert seconds_of(last) <= target_s / margin + 1e-9
    assert harness.scheduler.planner.time.num_unmet == 0


def test_prompt_alone_has_no_limit() -> None:
    harness = harness_of(0.03)
    plans = run_beside(harness, harness.add(2000, max_tokens=1))
    assert [sum(plan.counts) for plan in plans[:-1]] == [BUDGET] * (len(plans) - 1)


@pytest.mark.parametrize(("target_s", "prices"), [(math.inf, PRICES), (0.03, None)])
def test_without_target_or_prices_there_is_no_limit(target_s: float, prices: StepTimes | None) -> None:
    harness = harness_of(target_s, prices)
    start_streams(harness)
    plans = run_beside(harness, harness.add(2000, max_tokens=1))
    assert [sum(plan.counts) for plan in plans[:-1]] == [BUDGET] * (len(plans) - 1)


@pytest.mark.parametrize("field", StepTimes._fields)
def test_impossible_prices_are_those_known_before(field: str) -> None:
    """A worker whose arithmetic is broken stops no scheduler."""
    budget = TimeBudget(0.1)
    for value in (math.nan, math.inf, -math.inf, -1e-9):
        budget.record(PRICES._replace(**{field: value}))
        assert budget.times is None
    budget.record(PRICES)
    budget.record(PRICES._replace(step_s=0.0))
    budget.record(PRICES._replace(margin=0.9))
    assert budget.times == PRICES


def test_long_prompt_takes_as_much_longer_as_decodes_take_of_each_step() -> None:
    harness = harness_of(0.1)
    start_streams(harness)
    plans = run_beside(harness, harness.add(4000, max_tokens=1))
    alone_s = PRICES.seconds(chunk_work(0, 4000)) - PRICES.step_s
    decode_s = seconds_of(harness.schedule())
    assert sum(map(seconds_of, plans)) == pytest.approx(alone_s * 0.1 / (0.1 - decode_s), rel=0.1)


def test_short_prompt_waits_a_step_or_two_behind_a_long_one() -> None:
    harness = harness_of(0.1)
    start_streams(harness)
    harness.add(4000, max_tokens=1)
    for _ in range(3):
        harness.step()
    for _ in range(10):
        assert len(run_beside(harness, harness.add(20, max_tokens=1))) <= 1
    assert len(run_beside(harness, harness.add(100, max_tokens=1))) <= 4, "half of each step"


def test_target_that_decodes_miss_lets_prompts_advance_every_few_steps() -> None:
    harness = harness_of(0.01)  # decodes take 0.024
    streams = start_streams(harness)
    prompt = harness.add(200, max_tokens=1)
    before = harness.scheduler.planner.time.num_unmet
    plans = run_beside(harness, prompt)
    has_chunk = [max(plan.counts) > 1 for plan in plans]
    assert has_chunk == ([False, False, True] * len(plans))[: len(plans)]
    assert all(seconds_of(plan) < 0.06 for plan in plans)
    assert harness.scheduler.planner.time.num_unmet - before == len(plans)
    assert all(len(plan.sample_rows) >= len(streams) for plan in plans), "a token of each stream in each step"


def test_target_that_only_the_margin_misses_is_held() -> None:
    harness = harness_of(0.034, PRICES._replace(margin=1.5))  # decodes take 0.024, more than 0.034 / 1.5
    start_streams(harness)
    plans = run_beside(harness, harness.add(200, max_tokens=1))
    assert all(max(plan.counts) > 1 and seconds_of(plan) <= 0.034 for plan in plans[:-1])
    assert harness.scheduler.planner.time.num_unmet == 0


def test_prompt_behind_a_context_longer_than_a_step_is_not_read_for_each_token() -> None:
    prices = PRICES._replace(context_s=2e-5)                 # reading 4,000 tokens takes 0.08
    harness = harness_of(0.05, prices)
    start_streams(harness)
    plans = run_beside(harness, harness.add(4500, max_tokens=1))
    assert max(seconds_of(plan, prices) for plan in plans) < 3 * 0.09, "decodes, and twice its context"
    assert sum(max(plan.starts) > 4000 for plan in plans) < 40


@pytest.mark.parametrize("target_s", [1e-9, 5e-324])
def test_target_of_nearly_nothing_starves_no_prompt(target_s: float) -> None:
    harness = harness_of(target_s)
    start_streams(harness)
    assert len(run_beside(harness, harness.add(200, max_tokens=1))) < 200


def test_prompt_takes_over_where_the_decodes_are_preempted() -> None:
    """The first in order is a prompt without time, and the only decode behind it loses its blocks in that step."""
    rates = MeasuredRates(step_times=PRICES._replace(token_s=0.05))
    harness = Harness(num_blocks=19, budget=16, rates=rates, itl_target_s=1e-3, mode="recompute")
    prompt = harness.add(64, max_tokens=2, ignore_eos=True)
    for _ in range(2):
        harness.step()
    stream = harness.add(4, max_tokens=60, ignore_eos=True)
    while not harness.scheduler.step.preempted:
        plan = harness.schedule()
        harness.execute(plan)
    assert harness.scheduler.step.preempted == [stream.request_id]
    assert plan.counts == [16], "the prompt goes on alone, without a limit"
    harness.run()
    harness.assert_right(prompt)
    harness.assert_right(stream)


def test_step_planned_ahead_keeps_the_target() -> None:
    harness = harness_of(0.08)
    start_streams(harness)
    harness.add(3000, max_tokens=1)
    for _ in range(5):
        plan = harness.schedule()
        harness.executor.submit(plan)
        ahead = harness.scheduler.schedule_next()
        assert ahead is not None
        assert max(ahead.counts) > 10
        assert seconds_of(ahead) <= 0.08 + 1e-9
        harness.scheduler.update(plan, harness.executor.collect())


def test_bursts_of_short_prompts_are_not_held_up_before_a_stream_runs() -> None:
    harness = harness_of(0.03)
    for _ in range(10):
        harness.add(25, max_tokens=1)
    assert len(harness.schedule().counts) == 10


def time_to_first_token(first_s: float, target_s: float = 0.1, num_streams: int = 4) -> tuple[float, list[StepPlan]]:
    """Return the seconds of a prompt of 400 tokens that arrives behind one of 4,000, and the plans of the steps."""
    harness = harness_of(target_s, first_s=first_s)
    start_streams(harness, num_streams)
    harness.add(4000, max_tokens=1)
    for _ in range(3):
        harness.step()
    arrived_s = harness.now_s
    plans = run_beside(harness, harness.add(400, max_tokens=1))
    return harness.now_s - arrived_s, plans


def test_prompt_that_can_meet_its_target_is_hurried_past_a_longer_one() -> None:
    late_s, _ = time_to_first_token(math.inf)
    assert late_s > 4
    in_time_s, plans = time_to_first_token(1.6)
    assert in_time_s <= 1.6
    assert all(seconds_of(plan) <= 0.1 + 1e-9 for plan in plans)
    long_tokens = [max(plan.counts) for plan in plans if len(plan.counts) == 6]
    assert min(long_tokens) >= 20, "the one before it keeps half of each step"


def test_prompt_that_cannot_meet_its_target_is_not_hurried() -> None:
    late_s, _ = time_to_first_token(math.inf)
    assert time_to_first_token(0.2)[0] == pytest.approx(late_s)


def test_prompts_are_hurried_without_a_target_for_steps() -> None:
    late_s, _ = time_to_first_token(math.inf, math.inf)
    in_time_s, _ = time_to_first_token(3.0, math.inf)
    assert in_time_s <= 3.0 < late_s


def test_request_with_a_token_is_not_hurried() -> None:
    harness = harness_of(0.1, first_s=1.0)
    (stream,) = start_streams(harness, 1)
    harness.step()
    assert not harness.scheduler.planner.time.is_hurried(stream, 0, 400)
    assert harness.scheduler.planner.time.is_hurried(harness.add(400, max_tokens=1), 0, 400)
