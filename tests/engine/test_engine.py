"""The step loop over the real scheduler, when the executor fails."""

import random

import pytest

from quire.core.plan import StepResult
from quire.engine.engine import Engine
from support.fake_executor import FakeExecutor
from support.scheduling import Harness


class FailingExecutor:
    """Fails in some steps, before or after it has done the work; a plan that failed is gone."""

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


def test_admission_tells_what_was_found_at_first() -> None:
    harness = Harness(num_blocks=24, block_size=4, caching=True)
    engine = Engine(harness.scheduler, harness.executor)
    prompt = list(range(10))
    for expected in (0, 8):
        request = harness.add([*prompt, 49], max_tokens=1)
        engine.step()
        assert [admission[:3] for admission in engine.admissions] == [(request.request_id, 0, expected)]
