"""Requests that lack something: steps look at a bounded number of them, and they delay no other request."""

import random

import pytest

from quire.core.config import SchedulingPolicy
from quire.core.sequence import Request
from quire.scheduling.waiting_lines import MAX_LOOKS, Lack
from support.counted_calls import CountedCalls
from support.scheduling import Harness

POLICIES: tuple[SchedulingPolicy, ...] = ("priority", "fcfs", "fair")
MAX_RUNNING_ADAPTERS = 2


class Preparation:
    """Grammars that take some steps to compile from the first look on, and adapters of which few run at once.

    A request lacks what its `adapter_name` says: "grammar 3" a grammar that takes 3 steps, "a" the adapter a.
    """

    def __init__(self) -> None:
        self.num_looks, self.num_steps, self.forbidden = 0, 0, set[str]()
        self.harness: Harness | None = None
        self._ready_at: dict[int, int] = {}
        self._is_held, self._running = False, set[str]()

    def start_step(self) -> None:
        assert self.harness is not None
        self.num_looks, self._is_held, self.num_steps = 0, False, self.num_steps + 1
        running = (*self.harness.scheduler.queues.running, *self.harness.scheduler.queues.swapped)
        self._running = {each.adapter_name for each in running if is_adapter(each)}

    def __call__(self, request: Request) -> Lack | None:
        self.num_looks += 1
        name = request.adapter_name
        if name.startswith("grammar"):
            ready_at = self._ready_at.setdefault(request.request_id, self.num_steps + int(name.split()[1]))
            return Lack("grammar") if self.num_steps < ready_at else None
        if not name:
            return None
        is_new = name not in self._running
        self._is_held |= name in self.forbidden or (is_new and len(self._running) >= MAX_RUNNING_ADAPTERS)
        if self._is_held:
            return Lack("adapter", is_for_all=True)
        self._running.add(name)
        return None

    def lacks(self, request: Request) -> bool:
        """Return whether a request may lack something now."""
        return is_adapter(request) or self.num_steps < self._ready_at.get(request.request_id, 1 << 30)


def is_adapter(request: Request) -> bool:
    return bool(request.adapter_name) and not request.adapter_name.startswith("grammar")


def make_harness(policy: SchedulingPolicy, **settings: object) -> tuple[Harness, Preparation]:
    preparation = Preparation()
    harness = Harness(4000, scheduling_policy=policy, unprepared=preparation, **settings)  # type: ignore[arg-type]
    preparation.harness = harness
    return harness, preparation


def add(harness: Harness, lacking: str = "", client_id: str = "", **settings: object) -> Request:
    settings = {"max_tokens": 4, "ignore_eos": True} | settings
    request = harness.add(5, client_id=client_id, **settings)  # type: ignore[arg-type]
    request.adapter_name = lacking
    return request


def calls_of_step(harness: Harness, preparation: Preparation) -> int:
    """Return the calls of planning one step, which is run."""
    preparation.start_step()
    with CountedCalls() as calls:
        plan = harness.scheduler.schedule()
    harness.execute(plan)
    return calls.count


@pytest.mark.parametrize("lacking", ["grammar 1000", "adapter", "share"])
@pytest.mark.parametrize("policy", POLICIES)
def test_step_costs_the_same_however_many_lack_something(policy: SchedulingPolicy, lacking: str) -> None:
    costs = []
    for num_waiting in (100, 900):
        harness, preparation = make_harness(policy, max_kv_share=0.005 if lacking == "share" else 1.0, budget=256)
        preparation.forbidden = {"adapter"}
        for _ in range(4):
            add(harness, client_id="greedy", max_tokens=40)
        for number in range(num_waiting):
            client_id = "greedy" if number % 2 or lacking == "share" else f"client {number}"
            add(harness, "" if lacking == "share" else lacking, client_id)
        calls_of_step(harness, preparation)                  # looks at each, once
        costs.append([calls_of_step(harness, preparation) for _ in range(4)])
        assert preparation.num_looks <= MAX_LOOKS
    assert max(costs[1]) <= 1.2 * max(costs[0]), costs


@pytest.mark.parametrize("policy", POLICIES)
def test_step_costs_as_much_for_each_that_waits_for_a_prefix_however_many_do(policy: SchedulingPolicy) -> None:
    costs = []
    for num_waiting in (50, 200):
        harness = Harness(4000, budget=64, max_num_seqs=256, caching=True, scheduling_policy=policy)
        for number in range(1 + num_waiting):
            harness.add([*[7] * 24, number % 8, number // 8], max_tokens=2, client_id=f"client {number % 3}")
        with CountedCalls() as calls:
            plan = harness.scheduler.schedule()
        harness.execute(plan)
        assert harness.scheduler.queues.num_deferred == num_waiting
        costs.append(calls.count)
    assert costs[1] <= 5 * costs[0], costs


@pytest.mark.parametrize("lacking", ["grammar 1000", "adapter"])
@pytest.mark.parametrize("policy", POLICIES)
def test_request_that_lacks_nothing_runs_at_once_behind_hundreds_that_do(
    policy: SchedulingPolicy, lacking: str
) -> None:
    harness, preparation = make_harness(policy)
    preparation.forbidden = {"adapter"}
    add(harness, max_tokens=40)
    for _ in range(500):
        add(harness, lacking, "greedy")
    calls_of_step(harness, preparation)
    honest = add(harness, client_id="honest")
    calls_of_step(harness, preparation)
    assert honest in harness.scheduler.queues.running


@pytest.mark.parametrize("policy", POLICIES)
def test_looks_of_a_burst_are_divided_among_steps(policy: SchedulingPolicy) -> None:
    harness, preparation = make_harness(policy)
    preparation.forbidden = {"adapter"}
    for _ in range(3000):
        add(harness, "adapter")
    honest = add(harness)
    num_steps = 0
    while honest not in harness.scheduler.queues.running:
        preparation.start_step()
        plan = harness.scheduler.schedule()
        assert preparation.num_looks <= 1100
        if plan.is_empty:
            assert harness.scheduler.queues.wait_reasons.current == "adapter"
        num_steps += 1
    assert num_steps == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_adapter_that_is_held_up_comes_before_later_ones_that_could_run_on(policy: SchedulingPolicy) -> None:
    harness, preparation = make_harness(policy)
    for name in "ab":
        add(harness, name, max_tokens=8)
    held = add(harness, "c")
    for number in range(200):
        preparation.start_step()
        harness.step()
        if held in harness.scheduler.queues.running:
            break
        add(harness, "ab"[number % 2], max_tokens=8)        # without the rule they would keep both adapters in use
    assert held in harness.scheduler.queues.running
    assert number < 20


def test_steps_without_what_a_request_lacks_are_counted() -> None:
    harness, preparation = make_harness("priority")
    add(harness, max_tokens=40)
    request = add(harness, "grammar 3")
    while request not in harness.scheduler.queues.running:
        preparation.start_step()
        harness.step()
    assert sum(request.waited) == 3


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_random_schedules_starve_no_request_and_keep_the_order(policy: SchedulingPolicy, seed: int) -> None:
    """Each step looks at a bounded number, and no new request passes one before it that lacks nothing."""
    rng = random.Random(seed)
    share, seats = rng.choice([1.0, 0.01]), rng.choice([4, 8])
    harness, preparation = make_harness(policy, max_kv_share=share, max_num_seqs=seats, budget=256)
    kinds = ["", "a", "b", "c", "d", *(f"grammar {rng.randrange(40)}" for _ in range(4))]
    waiting_since: dict[int, int] = {}
    num_left = 300
    while num_left or harness.scheduler.has_requests:
        for _ in range(min(num_left, rng.choice([0, 0, 1, 40]))):
            num_left -= 1
            priority = rng.choice([0, 0, 3]) if policy == "priority" else 0
            request = add(harness, rng.choice(kinds), f"client {rng.randrange(3)}", priority=priority)
            waiting_since[request.request_id] = preparation.num_steps
        if rng.random() < 0.05 and harness.scheduler.queues.waiting:
            harness.scheduler.abort(rng.choice(harness.scheduler.queues.waiting).request_id)
        preparation.start_step()
        before = len(harness.scheduler.queues.lines.new)
        harness.step()
        assert preparation.num_looks <= before + 2 * MAX_LOOKS + seats
        for admitted in harness.scheduler.step.admitted:
            assert preparation.num_steps - waiting_since[admitted.request_id] < 1500, "starved"
            for earlier in harness.scheduler.queues.waiting:
                is_before = earlier.request_id < admitted.request_id and earlier.priority <= admitted.priority
                if is_before and share == 1.0 and (policy != "fair" or earlier.client_id == admitted.client_id):
                    assert preparation.lacks(earlier), "passed although it lacks nothing"
    harness.assert_empty()
