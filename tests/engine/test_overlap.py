"""Two plans in flight give the tokens of one at a time, whatever happens meanwhile."""

import random

import pytest

from quire.core.config import PreemptionMode
from quire.core.plan import GraphCounts, RowResult, StepPlan, StepResult
from quire.core.sampling_params import BeamSearchParams, SamplingParams
from quire.engine.engine import Engine
from support.fake_executor import FakeExecutor, expected_tokens
from support.scheduling import Harness


class Overlapping:
    """Passes plans on, notes how many are in flight, and fails now and then: before the work is done, or after."""

    max_steps_in_flight, graphs = 2, GraphCounts()

    def __init__(self, inner: FakeExecutor, rng: random.Random | None = None) -> None:
        self._inner, self._rng = inner, rng
        self.num_in_flight = self.most_in_flight = self.num_failures = 0
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        self._inner.submit(plan)

    def collect(self) -> StepResult:
        self.num_in_flight -= 1
        kind = self._rng.choice(["well"] * 6 + ["before", "after"]) if self._rng else "well"
        if kind == "before":
            self._inner.fail(self._inner.drop())
        else:
            result = self._inner.collect()
            if kind == "well":
                return result
        self.num_failures += 1
        raise RuntimeError("no device")


def step(engine: Engine, harness: Harness) -> None:
    """Run one step, failed or not, and take down what it gave."""
    try:
        deltas = engine.step()
    except RuntimeError:
        deltas = []
    harness.check()
    for delta in deltas:
        harness.take(delta)


def add_some(harness: Harness, rng: random.Random) -> None:
    """Queue a request of any kind; some have to see every token before the next is drawn."""
    prompt = list(range(40))[: rng.choice([0, 5, 9, 40])] + [9] * rng.randint(1, 5)
    kind = rng.choice(["plain", "plain", "plain", "branches", "penalized", "beams"])
    max_tokens = rng.randint(1, 14)
    if kind == "beams":
        harness.add_beams(prompt, BeamSearchParams(beam_width=2, max_tokens=max_tokens))
        return
    settings = {"branches": {"n": 3}, "penalized": {"presence_penalty": 0.5}}.get(kind, {})
    harness.add(prompt, eos={rng.randrange(50)}, max_tokens=max_tokens, **settings)


@pytest.mark.parametrize("fails", [False, True], ids=["well", "failing"])
@pytest.mark.parametrize("num_blocks", [28, 90], ids=["short of blocks", "room for all"])
@pytest.mark.parametrize("seed", range(8))
def test_overlap_changes_no_tokens_and_loses_no_blocks(seed: int, num_blocks: int, fails: bool) -> None:
    rng = random.Random(seed)
    harness = Harness(
        num_blocks, budget=rng.choice([8, 16]), caching=rng.random() < 0.5, num_swap_blocks=12,
        num_state_slots=(0, 12, 9, 40)[seed % 4], num_swap_slots=4 * (seed % 4),
    )  # fmt: skip
    executor = Overlapping(harness.executor, rng if fails else None)
    engine = Engine(harness.scheduler, executor)
    aborted = set[int]()
    for _ in range(10):
        add_some(harness, rng)
        for _ in range(rng.randint(0, 8)):
            step(engine, harness)
        if rng.random() < 0.2:
            request_id = rng.choice(list(harness.requests))
            if engine.abort(request_id):
                aborted.add(request_id)
    while harness.scheduler.has_requests:
        step(engine, harness)
    assert harness.cache.num_free_blocks == harness.num_blocks
    assert fails <= (executor.num_failures > 0)
    assert executor.most_in_flight == 2
    for request in harness.requests.values():
        harness.assert_right(request, whole=request.request_id not in aborted)


def test_steady_decodes_are_always_one_step_ahead() -> None:
    harness = Harness(num_blocks=60)
    executor = Overlapping(harness.executor)
    engine = Engine(harness.scheduler, executor)
    requests = [harness.add(5, max_tokens=12, ignore_eos=True) for _ in range(3)]
    step(engine, harness)
    for _ in range(5):
        num_plans = len(executor.plans)
        step(engine, harness)
        assert len(executor.plans) == num_plans + 1  # while the one before it is not collected
        assert executor.plans[-1].starts == [request.live[0].num_tokens - 1 for request in requests]


def test_chunks_of_a_prompt_are_one_step_ahead_like_decodes() -> None:
    harness = Harness(num_blocks=60)
    executor = Overlapping(harness.executor)
    engine = Engine(harness.scheduler, executor)
    requests = [harness.add(3, max_tokens=9, ignore_eos=True), harness.add(50, max_tokens=3, ignore_eos=True)]
    while harness.scheduler.has_requests:
        step(engine, harness)
        assert executor.num_in_flight == harness.scheduler.has_requests
    counts = [plan.counts for plan in executor.plans]
    assert counts == [[3, 13], [1, 15], [1, 15], [1, 7], [1, 1], [1, 1], *[[1]] * 3]
    for request in requests:
        harness.assert_right(request)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_who_waits_for_blocks_holds_up_nobody(mode: PreemptionMode) -> None:
    """Blocks are free, but too few for the next request, new or preempted: those that run are one step ahead."""
    harness = Harness(num_blocks=14, num_swap_blocks=14, mode=mode)
    executor = Overlapping(harness.executor)
    engine = Engine(harness.scheduler, executor)
    requests = [harness.add(15, max_tokens=24, ignore_eos=True) for _ in range(3)]
    in_flight = list[int]()
    while harness.scheduler.has_requests:
        step(engine, harness)
        if harness.scheduler.queues.swapped or harness.scheduler.queues.waiting:
            in_flight.append(executor.num_in_flight)
    assert any(request.num_preemptions for request in requests)
    assert sum(in_flight) > 0.7 * len(in_flight), "more than to come in and to give way"
    for request in requests:
        harness.assert_right(request)


def test_branches_fork_when_nothing_is_in_flight() -> None:
    harness = Harness(num_blocks=60)
    executor = Overlapping(harness.executor)
    engine = Engine(harness.scheduler, executor)
    request, in_flight = harness.add(40, n=2, max_tokens=4, ignore_eos=True), list[int]()
    while harness.scheduler.has_requests:
        step(engine, harness)
        in_flight.append(executor.num_in_flight)
    assert [plan.counts for plan in executor.plans] == [[16], [16], [8], [1, 1], [1, 1], [1, 1]]
    assert in_flight == [1, 0, 1, 1, 1, 0]
    harness.assert_right(request)


def test_step_that_fails_for_nobody_takes_no_answer_along() -> None:
    """A request ends by a token while the step after it runs, and that one fails."""

    class Failing(Overlapping):
        def collect(self) -> StepResult:
            result = super().collect()
            if not harness.scheduler.queues.running:
                raise RuntimeError("no device")
            return result

    harness = Harness(num_blocks=60)
    engine = Engine(harness.scheduler, Failing(harness.executor))
    prompt = [1, 2, 3]
    (tokens,) = expected_tokens(prompt, SamplingParams(max_tokens=9), 0, 9, frozenset())
    last = next(token for index, token in enumerate(tokens) if index > 2 and token not in tokens[:index])
    request = harness.add(prompt, eos=[last], max_tokens=20)
    while harness.scheduler.has_requests:
        step(engine, harness)
    harness.assert_right(request)
    harness.assert_empty()


def test_who_has_to_see_its_token_sits_out_every_other_step() -> None:
    harness = Harness(num_blocks=60)
    executor = Overlapping(harness.executor)
    engine = Engine(harness.scheduler, executor)
    plain, penalized = harness.add(5, max_tokens=20), harness.add(5, max_tokens=9, frequency_penalty=0.5)
    for _ in range(8):
        step(engine, harness)
    widths = [len(plan.rows) for plan in executor.plans[:8]]
    assert widths == [2, 1, 2, 1, 2, 1, 2, 1]
    assert penalized.live[0].num_output_tokens == 4 < plain.live[0].num_output_tokens == 8


def test_newcomers_are_let_in_as_soon_as_what_is_in_flight_is_over() -> None:
    harness = Harness(num_blocks=60)
    engine = Engine(harness.scheduler, Overlapping(harness.executor))
    harness.add(5, max_tokens=20, ignore_eos=True)
    step(engine, harness)
    assert [each.request_id for each in engine.admissions] == [0]
    step(engine, harness)
    assert engine.admissions == []
    late = harness.add(5, max_tokens=2, ignore_eos=True)
    step(engine, harness)
    step(engine, harness)
    assert [each.request_id for each in engine.admissions] == [late.request_id]


def test_step_in_flight_for_who_has_ended_hides_nothing_of_the_one_before_it() -> None:
    """Above all not an admission."""
    harness = Harness(num_blocks=60)
    executor = Overlapping(harness.executor)
    engine = Engine(harness.scheduler, executor)
    request = harness.add(5, max_tokens=20)
    first, *_ = harness.expected(request)[0]
    request.stop_token_ids = frozenset({first})
    deltas = engine.step()
    assert executor.most_in_flight == 2
    assert [delta.token_ids for delta in deltas] == [[first]]
    assert [each.request_id for each in engine.admissions] == [0]
    assert not harness.scheduler.has_requests


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_executor_is_given_as_many_steps_as_it_takes(max_steps_in_flight: int) -> None:
    harness = Harness(num_blocks=60)
    executor = Overlapping(harness.executor)
    executor.max_steps_in_flight = max_steps_in_flight
    engine = Engine(harness.scheduler, executor)
    request = harness.add(5, max_tokens=9, ignore_eos=True)
    while harness.scheduler.has_requests:
        step(engine, harness)
    assert executor.most_in_flight == max_steps_in_flight
    harness.assert_right(request)


def test_no_step_is_planned_beside_one_that_verifies_drafts() -> None:
    harness = Harness(num_blocks=60)
    request = harness.add(5, max_tokens=9, ignore_eos=True)
    plan = harness.schedule()
    (row,) = plan.sample_rows
    harness.scheduler.update(plan, StepResult([4], rows={row: RowResult([4], drafts=[5, 6])}))
    plan = harness.schedule()
    assert plan.drafts
    assert harness.scheduler.schedule_next() is None
    harness.scheduler.update(plan, StepResult([5, 6, 7], rows={row: RowResult([5, 6, 7])}))
    assert harness.schedule().counts == [1]
    assert harness.scheduler.schedule_next() is not None
    assert request.live[0].token_ids.output == [4, 5, 6, 7]


def test_drafts_that_the_step_in_flight_has_passed_are_dropped() -> None:
    harness = Harness(num_blocks=60)
    request = harness.add(5, max_tokens=9, ignore_eos=True)
    plan = harness.schedule()
    assert harness.scheduler.schedule_next() is not None
    (row,) = plan.sample_rows
    harness.scheduler.update(plan, StepResult([4], rows={row: RowResult([4], drafts=[5, 6])}))
    assert request.live[0].drafts == ()


def test_step_in_flight_needs_rows_of_one_token() -> None:
    harness = Harness(num_blocks=60)
    harness.add(5, max_tokens=9, ignore_eos=True)
    plan = harness.schedule()
    assert harness.scheduler.schedule_next() is not None
    (row,) = plan.sample_rows
    with pytest.raises(AssertionError, match="one token"):
        harness.scheduler.update(plan, StepResult([4], rows={row: RowResult([4, 5])}))
