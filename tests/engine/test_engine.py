"""The step loop over the real scheduler, when the executor fails."""

import random
import traceback
from contextlib import suppress
from itertools import count

import pytest

from quire.cache.manager import KVCacheManager
from quire.core.config import MemoryPolicy
from quire.core.plan import GraphCounts, StepResult
from quire.core.pooling import BeamTask
from quire.core.sampling_params import BeamSearchParams, SamplingParams
from quire.engine.engine import Engine
from quire.scheduling import result_recorder
from quire_lab.baselines.buddy_pool import BuddyPool
from support.fake_executor import FakeExecutor
from support.scheduling import Harness, make_request


class FailingExecutor:
    """Fails in some steps, before or after it has done the work; a plan that failed is gone."""

    max_steps_in_flight, graphs = 1, GraphCounts()

    def __init__(self, inner: FakeExecutor, rng: random.Random) -> None:
        self.submit = inner.submit
        self._inner = inner
        self._rng = rng
        self.num_failures = 0

    def collect(self) -> StepResult:
        kind = self._rng.choice(["well", "well", "before", "after"])
        if kind == "before":
            self._inner.drop()
        result = None if kind == "before" else self._inner.collect()
        if result is None or kind == "after":
            self.num_failures += 1
            raise KeyboardInterrupt if self._rng.random() < 0.5 else RuntimeError("no device")
        return result


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_failed_steps_change_no_tokens_and_lose_no_blocks(seed: int, caching: bool) -> None:
    rng = random.Random(seed)
    harness = Harness(num_blocks=24, block_size=4, budget=rng.choice([3, 16]), caching=caching)
    executor = FailingExecutor(harness.executor, rng)
    engine = Engine(harness.scheduler, executor)
    for _ in range(6):
        prompt = [0, 1, 2, 3, 4, 5, 6, 7, 8][: rng.randint(0, 9)] + [9] * rng.randint(1, 5)
        harness.add(prompt, n=rng.choice([1, 3]), max_tokens=rng.randint(1, 12), ignore_eos=True)
    while harness.scheduler.has_requests:
        try:
            deltas = engine.step()
        except (KeyboardInterrupt, RuntimeError):
            deltas = []
        harness.scheduler.check()
        for delta in deltas:
            harness.outputs.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
    assert executor.num_failures > 0
    assert harness.cache.num_free_blocks == harness.num_blocks
    for request in harness.requests.values():
        harness.assert_right(request)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(("owner", "name"), [(result_recorder, "SequenceDelta"), (KVCacheManager, "free")])
@pytest.mark.parametrize("seed", range(4))
def test_step_that_fails_while_it_is_recorded_loses_no_token(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, kind: type[BaseException], seed: int
) -> None:
    rng = random.Random(seed)
    inner, failures = getattr(owner, name), list[None]()

    def fail_at_times(*arguments: object, **options: object) -> object:
        if rng.random() < 0.3 and "update" in {frame.name for frame in traceback.extract_stack()}:
            failures.append(None)
            raise kind("here")
        return inner(*arguments, **options)

    monkeypatch.setattr(owner, name, fail_at_times)
    harness = Harness(num_blocks=40, block_size=4, budget=16)
    engine = Engine(harness.scheduler, harness.executor)
    for num_tokens in range(1, 9):
        harness.add(num_tokens, n=1 + num_tokens % 2, max_tokens=num_tokens, ignore_eos=True)
    while harness.scheduler.has_requests:
        deltas = []
        with suppress(kind):
            deltas = engine.step()
        harness.scheduler.check()
        for delta in deltas:
            harness.take(delta)
    assert failures
    assert harness.cache.num_free_blocks == harness.num_blocks
    for request in harness.requests.values():
        harness.assert_right(request)


@pytest.mark.parametrize(
    ("policy", "point"),
    [("paged", "refork"), ("paged", "block_array"),
     ("contiguous-oracle", "free"), ("contiguous-oracle", "fork"), ("contiguous-oracle", "block_array")],
)  # fmt: skip
@pytest.mark.parametrize("nth", range(1, 9, 2))
def test_search_that_cannot_go_on_fails_alone(
    monkeypatch: pytest.MonkeyPatch, policy: MemoryPolicy, point: str, nth: int
) -> None:
    assert_one_fails_alone(monkeypatch, policy, (KVCacheManager, point), within="advance", nth=nth)


@pytest.mark.parametrize("nth", range(1, 9))
def test_sequence_that_gets_no_chunk_fails_alone(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """Neither one that begins nor one that forks is left with a row and no blocks."""
    assert_one_fails_alone(monkeypatch, "contiguous-oracle", (BuddyPool, "allocate"), within="schedule", nth=nth)


def assert_one_fails_alone(
    monkeypatch: pytest.MonkeyPatch, policy: MemoryPolicy, point: tuple[type, str], within: str, nth: int
) -> None:
    """Let the nth call of a method within another one fail: just one request may, the others are answered."""
    hits, inner = count(1), getattr(*point)

    def fail(*arguments: object) -> object:
        if within in {frame.name for frame in traceback.extract_stack()} and next(hits) == nth:
            raise RuntimeError("here")
        return inner(*arguments)

    harness = Harness(num_blocks=60, block_size=4, budget=16, policy=policy)
    engine = Engine(harness.scheduler, harness.executor)
    for prompt in ([1, 2, 3], [4, 5, 6]):
        harness.add_beams(prompt, BeamSearchParams(beam_width=3, max_tokens=8))
        harness.add(prompt, n=2, max_tokens=9, ignore_eos=True)
    monkeypatch.setattr(*point, fail)
    failed = list[int]()
    while harness.scheduler.has_requests:
        try:
            deltas = engine.step()
        except RuntimeError as error:
            deltas = engine.recover(error)
        failed += [delta.request_id for delta in deltas if delta.error]
        for delta in deltas:
            if delta.error is None:
                harness.take(delta)
    assert len(failed) == 1
    assert within == "schedule" or isinstance(harness.requests[failed[0]].task, BeamTask)
    assert harness.cache.num_free_blocks == harness.num_blocks
    for request in harness.requests.values():
        harness.assert_right(request, whole=request.request_id not in failed)


def test_admission_tells_what_was_found_at_first() -> None:
    harness = Harness(num_blocks=24, block_size=4, caching=True)
    engine = Engine(harness.scheduler, harness.executor)
    prompt = list(range(10))
    for expected in (0, 8):
        request = harness.add([*prompt, 49], max_tokens=1)
        engine.step()
        assert [admission[:3] for admission in engine.admissions] == [(request.request_id, 0, expected)]


def test_clock_is_read_once_for_each_request_and_each_step() -> None:
    harness, times = Harness(num_blocks=8), count(100)
    engine = Engine(harness.scheduler, harness.executor, clock=lambda: float(next(times)))
    request = make_request(0, [1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
    engine.add(request, age_s=7.5)
    assert request.arrived_s == 92.5
    num_steps = 0
    while harness.scheduler.has_requests:
        engine.step()
        num_steps += 1
    assert next(times) == 101 + num_steps
