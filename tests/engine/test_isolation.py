"""A request that makes steps fail is found by computing suspects in groups, and fails alone."""

import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from quire.core.plan import GraphCounts, StepPlan, StepResult
from quire.core.sampling_params import BeamSearchParams
from quire.core.sequence import NO_ROW
from quire.engine.engine import Engine
from quire.engine.recording.record import Held, Requeued, RolledBack
from quire.scheduling.isolation import MAX_FRUITLESS, PROBE_ID
from support.records import Records, events_of, replayed
from support.scheduling import Harness, random_beams, random_params


class FaultError(RuntimeError):
    """A step that has failed."""


class Faulty:
    """The fake executor; a step for which `fails` holds leaves garbage and fails."""

    max_steps_in_flight, graphs = 1, GraphCounts()

    def __init__(self, harness: Harness, fails: Callable[[StepPlan], bool]) -> None:
        self._executor, self._fails, self._plans = harness.executor, fails, list[StepPlan]()
        self.num_failures = self.num_steps = 0

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        plan = self._plans.pop(0)
        self.num_steps += 1
        if self._fails(plan):
            self.num_failures += 1
            self._executor.fail(plan)
            raise FaultError("here")
        self._executor.submit(plan)
        return self._executor.collect()


class Served:
    """All requests of a harness, run to their ends by an engine whose steps may fail."""

    def __init__(self, harness: Harness, fails: Callable[[StepPlan], bool], *, overlaps: bool = False) -> None:
        self.harness, self.executor = harness, Faulty(harness, fails)
        self.executor.max_steps_in_flight = 2 if overlaps else 1
        self.engine = Engine(harness.scheduler, self.executor)
        self.failed: dict[int, str] = {}

    def step(self) -> None:
        try:
            deltas = self.engine.step()
        except FaultError as error:
            deltas = self.engine.recover(error)
        self.harness.check()
        assert all(admission.request_id != PROBE_ID for admission in self.engine.admissions)
        for delta in deltas:
            assert delta.request_id not in self.failed, "a delta after the last"
            if delta.error is None:
                self.harness.take(delta)
            else:
                self.failed[delta.request_id] = delta.error

    def run(self) -> None:
        while self.harness.scheduler.has_requests:
            assert self.executor.num_steps < 20_000, "no end in sight"
            self.step()
        self.harness.assert_empty()

    def assert_failed(self, poisoned: Iterable[int]) -> None:
        """Just these have failed, all others gave the tokens that they give alone."""
        assert self.failed.keys() == set(poisoned)
        assert all("FaultError" in reason for reason in self.failed.values())
        for request in self.harness.requests.values():
            self.harness.assert_right(request, whole=request.request_id not in self.failed)


def holding(harness: Harness, poisoned: Iterable[int], num_tokens: int = 0) -> Callable[[StepPlan], bool]:
    """Fail each step that computes a token from `num_tokens` on of one of these requests."""
    ids = set(poisoned)

    def fails(plan: StepPlan) -> bool:
        rows = {
            row for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True)
            if start + count > num_tokens
        }  # fmt: skip
        requests = harness.scheduler.queues.running
        return any(s.row in rows for r in requests if r.request_id in ids for s in r.live if s.row != NO_ROW)

    return fails


def crowd(size: int = 16, **settings: int) -> Harness:
    harness = Harness(**{"num_blocks": 400, "max_num_seqs": 32, "budget": 256} | settings)  # type: ignore[arg-type]
    for index in range(size):
        harness.add(3 + index, max_tokens=6, ignore_eos=True)
    return harness


@pytest.mark.parametrize("poisoned", range(16))
def test_culprit_is_found_in_halves(poisoned: int) -> None:
    harness = crowd()
    served = Served(harness, holding(harness, [poisoned]))
    served.run()
    served.assert_failed([poisoned])
    assert served.executor.num_failures == 5, "16 suspects, then 8, 4, 2, and the culprit alone"


@pytest.mark.parametrize("num_tokens", [0, 5, 9, 20])
def test_request_that_fails_later_is_found_as_well(num_tokens: int) -> None:
    harness = crowd(budget=11)
    served = Served(harness, holding(harness, [15], num_tokens))
    served.run()
    served.assert_failed([15])


@pytest.mark.parametrize("poisoned", [[0, 1], [3, 4, 5], [0, 7, 15], range(16)], ids=str)
def test_many_culprits_fail_and_the_engine_goes_on(poisoned: list[int]) -> None:
    harness = crowd()
    served = Served(harness, holding(harness, poisoned))
    served.run()
    served.assert_failed(poisoned)


@pytest.mark.parametrize("overlaps", [False, True])
def test_isolation_is_recorded_and_repeated(overlaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records(tmp_path, monkeypatch)
    harness = crowd(budget=11)
    served = Served(harness, holding(harness, [5, 11], 9), overlaps=overlaps)
    served.run()
    served.assert_failed([5, 11])
    events = events_of(records.close())
    assert {Held, Requeued, RolledBack} <= {type(event) for event in events}
    run = replayed(events)
    assert run.scheduler.cache.stats() == harness.cache.stats()
    assert (tmp_path / f"fault-{records.path.name}").samefile(records.path)


def test_request_that_runs_alone_and_fails_is_told() -> None:
    harness = crowd(1)
    served = Served(harness, holding(harness, [0]))
    served.run()
    served.assert_failed([0])
    assert served.executor.num_failures == 2, "once more by itself, before it is blamed"


def test_fault_that_passes_fails_no_request() -> None:
    harness = crowd()
    served = Served(harness, lambda plan: served.executor.num_steps in (3, 20))
    served.run()
    served.assert_failed([])


@pytest.mark.parametrize("size", [1, 2, 16])
def test_device_that_fails_every_step_ends_the_engine_and_no_request_is_blamed(size: int) -> None:
    harness = crowd(size)
    served = Served(harness, lambda plan: served.executor.num_steps > 3)
    with pytest.raises(FaultError):
        served.run()
    assert not served.failed
    assert served.executor.num_failures <= 7, "halves, one alone, and the probe"


def test_requests_that_fail_only_together_end_the_engine() -> None:
    """They cannot be separated: each runs well alone."""
    harness = crowd()
    served = Served(harness, lambda plan: len(plan.rows) > 1)
    with pytest.raises(FaultError):
        served.run()
    assert not served.failed
    assert served.engine._isolation._num_fruitless == MAX_FRUITLESS


def test_step_that_computes_for_no_request_and_fails_twice_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = crowd()
    served = Served(harness, lambda plan: False)

    def fail(now_s: float) -> None:
        raise FaultError("here")

    monkeypatch.setattr(harness.scheduler.planner, "start_step", fail)
    served.step()
    with pytest.raises(FaultError):
        served.step()
    assert not served.failed


def test_arrivals_wait_until_the_culprit_is_found() -> None:
    harness = crowd()
    served = Served(harness, holding(harness, [9]))
    while served.executor.num_failures < 2:
        served.step()
    late = harness.add(5, max_tokens=6, ignore_eos=True)
    while 9 not in served.failed:
        assert late not in harness.scheduler.queues.running
        served.step()
    served.run()
    served.assert_failed([9])


@pytest.mark.parametrize("moment", range(1, 8))
def test_suspects_may_be_aborted(moment: int) -> None:
    harness = crowd()
    served = Served(harness, holding(harness, [9]))
    while served.executor.num_failures < 1:
        served.step()
    for _ in range(moment):
        served.step()
    aborted = {8, 9, 10, 15} & harness.scheduler.queues.requests.keys()
    for request_id in aborted:
        served.engine.abort(request_id)
        harness.check()
    served.run()
    assert served.failed.keys() <= {9}
    for request in harness.requests.values():
        harness.assert_right(request, whole=request.request_id not in aborted | served.failed.keys())


def test_all_requests_may_be_aborted() -> None:
    harness = crowd()
    served = Served(harness, holding(harness, [9]))
    while served.executor.num_failures < 5:
        served.step()
    for request_id in list(harness.requests):
        served.engine.abort(request_id)
    late = harness.add(5, max_tokens=6, ignore_eos=True)
    served.run()
    assert not served.failed
    harness.assert_right(late)


@pytest.mark.parametrize("policy", ["paged", "fair", "swapping", "contiguous-max", "static"])
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_random_culprits_fail_alone(policy: str, overlaps: bool, seed: int) -> None:
    rng = random.Random(seed)
    harness = random_harness(rng, policy)
    for _ in range(rng.randint(2, 14)):
        if policy != "static" and rng.random() < 0.2:
            beams = random_beams(rng)
            harness.add_beams(rng.randint(1, 12), BeamSearchParams(min(3, beams.beam_width), max_tokens=8))
        else:
            params = random_params(rng, crowded=False)
            harness.add(rng.randint(1, 12), client_id=str(len(harness.requests) % 3), **params)
    poisoned = rng.sample(sorted(harness.requests), rng.randint(0, 2))
    fails = holding(harness, poisoned, num_tokens=rng.choice([0, 4, 14]))
    transient = rng.sample(range(1, 60), 0 if poisoned else 1)
    served = Served(harness, lambda plan: served.executor.num_steps in transient or fails(plan), overlaps=overlaps)
    served.run()
    assert served.failed.keys() <= set(poisoned), "a culprit may end before it fails"
    for request in harness.requests.values():
        harness.assert_right(request, whole=request.request_id not in served.failed)


def random_harness(rng: random.Random, policy: str) -> Harness:
    settings = {"max_num_seqs": 16, "budget": rng.choice([5, 16, 64]), "max_model_len": 64}
    if policy in ("paged", "fair"):
        caching, window = rng.random() < 0.7, rng.choice([None, 8])
        order = "fair" if policy == "fair" else "priority"
        num_blocks = rng.choice([90, 200])
        return Harness(num_blocks, caching=caching, window=window, scheduling_policy=order, **settings)
    if policy == "swapping":
        return Harness(60, num_swap_blocks=400, mode="swap", caching=rng.random() < 0.5, **settings)
    batching = "static" if policy == "static" else "continuous"
    return Harness(320, policy="contiguous-max", batching=batching, **settings)
