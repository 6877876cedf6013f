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
        result = None if kind == "before" else self._inner.collect()
        if result is None or kind == "after":
            self.num_failures += 1
            raise KeyboardInterrupt if self._rng.random() < 0.5 else RuntimeError("no device")
        return result


@pytest.mark.parametrize("seed", range(10))
def test_failed_steps_change_no_tokens_and_lose_no_blocks(seed: int) -> None:
    rng = random.Random(seed)
    harness = Harness(num_blocks=24, block_size=4, budget=rng.choice([3, 16]))
    executor = FailingExecutor(harness.executor, rng)
    engine = Engine(harness.scheduler, executor)
    for _ in range(6):
        harness.add(rng.randint(1, 14), n=rng.choice([1, 3]), max_tokens=rng.randint(1, 12), ignore_eos=True)
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
