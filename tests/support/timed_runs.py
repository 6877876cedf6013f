"""Random runs of the real scheduler on a virtual clock with targets of time, on machines whose times drift and jump.

The model of steps' times that the scheduler plans by is the worker's own, one that stays what it was, or one that lies.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.plan import StepPlan
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.core.step_times import StepTimes, StepWork, chunk_work
from quire.execution.step_timer import StepTimer
from quire.scheduling.scheduler import make_scheduler
from quire.scheduling.time_budget import MOST_STEPS
from quire.scheduling.waiting_lines import AGEING_STEPS
from quire_lab.sim.simulation import Answer, SimulatedExecutor, Simulation
from quire_lab.sim.workloads import WorkItem
from support.scheduling import make_request

BLOCK_SIZE = 4
JUMP_S = 10.0       # a neighbour takes a core for so long
JUMP = 3.0          # and steps take so many times as long


class StaleTimer(StepTimer):
    """Prices that were right once."""

    def __init__(self, times: StepTimes) -> None:
        super().__init__()
        self.times = times

    def record(self, starts: object, stops: object, num_samples: int, seconds: float) -> float | None:
        return None


class LyingTimer(StaleTimer):
    """Prices that are others after each step, up to a million times too low or too high, some of them 0."""

    def __init__(self, rng: random.Random, times: StepTimes) -> None:
        super().__init__(times)
        self._rng, self._truth = rng, times

    def record(self, starts: object, stops: object, num_samples: int, seconds: float) -> float | None:
        prices = [price * self._rng.choice([0.0, 1e-6, 0.1, 1.0, 10.0, 1e6]) for price in self._truth[:5]]
        self.times = StepTimes(max(prices[0], 1e-9), *prices[1:], self._rng.choice([1.0, 1.5]))
        return None


def random_times(rng: random.Random) -> StepTimes:
    """Return prices of a machine on which a step takes 1 to 500 ms."""
    step_s = 10 ** rng.uniform(-3, -0.3)
    prices = (step_s * rng.uniform(0, most) for most in (0.5, 0.01, 0.01, 0.5))
    return StepTimes(step_s, *prices)


def random_speed(rng: random.Random) -> Callable[[float], float]:
    """Return how many times as long as at first a step takes at a time: it drifts, jumps, or stays."""
    kind, period_s, start_s = rng.choice(["steady", "drift", "jump"]), rng.uniform(1, 60), rng.uniform(0, 20)
    if kind == "drift":
        return lambda now_s: 2 ** math.sin(now_s / period_s)
    if kind == "jump":
        return lambda now_s: JUMP if (now_s - start_s) % (2 * JUMP_S) < JUMP_S else 1.0
    return lambda now_s: 1.0


def random_timer(rng: random.Random, times: StepTimes) -> StepTimer | None:
    """Return a timer that measures, one that is stale, one that lies, or none."""
    kind = rng.choice(["measured", "stale", "lies", "lies", "none"])
    if kind == "measured":
        return StepTimer()
    if kind == "stale":
        return StaleTimer(times)
    return LyingTimer(rng, times) if kind == "lies" else None


def work_of(plan: StepPlan) -> StepWork:
    """Return what a plan computes."""
    sampled = set(plan.sample_tokens)
    work, end = StepWork(), 0
    for start, count in zip(plan.starts, plan.counts, strict=True):
        work += chunk_work(start, count, len(sampled.intersection(range(end, end + count))))
        end += count
    return work


@dataclass
class TimedRun:
    """A random load on a random machine. Others keep coming until the first request has ended."""

    seed: int
    num_steps: int = 0
    longest_wait: int = 0          # steps in a row in which no prompt that holds a row advanced
    num_over_target: int = 0       # steps with decodes and chunks that took longer than the target
    num_within_target: int = 0

    def __post_init__(self) -> None:
        rng = self._rng = random.Random(self.seed)
        times, speed = random_times(rng), random_speed(rng)
        self._target_s = rng.choice([math.inf, *[times.step_s * 10 ** rng.uniform(-2, 2)] * 3])
        self._longest = rng.choice([6, 40, 200])
        self._levels = [0, 0, 0, rng.choice([0, 0, 0, 1])]
        max_num_seqs = rng.choice([1, 2, 4, 8])
        num_blocks = (self._longest + 24) // BLOCK_SIZE * rng.choice([1, 2, 4]) + 2
        config = SchedulerConfig(
            max_num_seqs,
            rng.choice([1, 8, 64]),
            1 << 20,
            rng.choice(["auto", "recompute", "swap"]),
            scheduling_policy=rng.choice(["priority", "priority", "fair"]),
            max_kv_share=rng.choice([1.0, 1.0, rng.uniform(0.1, 1.0)]),
            itl_target_s=self._target_s,
            ttft_target_s=rng.choice([math.inf, times.step_s * 10 ** rng.uniform(0, 3)]),
        )
        cache = CacheConfig(num_blocks, BLOCK_SIZE, None, rng.random() < 0.5, rng.choice([0, num_blocks]))
        self._scheduler = make_scheduler(config, cache)
        executor = SimulatedExecutor(
            lambda plan: times.seconds(work_of(plan)) * speed(executor.now_s), timer=random_timer(rng, times)
        )
        self._simulation = Simulation(self._scheduler, executor, self._on_step)
        self._num_waits = 0
        self._accepted, self._aborted = dict[int, Answer](), set[int]()
        self._num_clients, self._number = rng.choice([1, 3]), 0

    def run(self) -> "TimedRun":
        """Run until all has been answered; AssertionError if something waits too long."""
        rng, scheduler = self._rng, self._scheduler
        for _ in range(rng.randint(1, 6)):
            self._add(rng.randint(1, self._longest), rng.randint(1, 24))
        answers = list(self._accepted.values())
        work = sum(answer.item.output_len + len(answer.item.prompt_token_ids) for answer in answers)
        bound = 4 * MOST_STEPS * work + 2 * AGEING_STEPS * max(self._levels) + 1000
        while answers and answers[0].finished_s is None:
            if len(scheduler.queues.waiting) < 4:
                self._add(rng.randint(1, min(self._longest, 20)), rng.randint(1, 8), rng.choice(self._levels))
            if rng.random() < 0.02:
                self._abort_any(but=next(iter(self._accepted)))
            self._step()
            assert self.num_steps <= bound, f"the first request waits: {self.num_steps} steps"
        while scheduler.has_requests:
            self._step()
            assert self.num_steps <= 3 * bound, f"no end in sight: {self.num_steps} steps"
        ended = {number for number, answer in self._accepted.items() if answer.finished_s is not None}
        assert ended | self._aborted == set(self._accepted)
        scheduler.check()
        assert scheduler.cache.num_free_blocks == scheduler.cache.num_blocks
        return self

    def _abort_any(self, but: int) -> None:
        """Abort some request, unless that is `but` or has ended."""
        number = self._rng.choice(list(self._accepted))
        if number != but and self._scheduler.abort(number):
            self._aborted.add(number)

    def _step(self) -> None:
        self._simulation.step()
        self.num_steps += 1

    def _add(self, prompt_len: int, output_len: int, priority: int = 0) -> None:
        """Queue a request that is due now. One that could never run is refused."""
        rng, number = self._rng, self._number
        self._number += 1
        item = WorkItem([rng.randrange(3) for _ in range(prompt_len)], output_len)
        params = SamplingParams(n=rng.choice([1, 1, 1, 2]), max_tokens=output_len, ignore_eos=True)
        request: Request = make_request(number, item.prompt_token_ids, params)
        request.priority, request.client_id = priority, f"client {rng.randrange(self._num_clients)}"
        request.weight = rng.choice([0.5, 1.0, 3.0])
        if self._simulation.add(request, item, self._simulation.now_s):
            self._accepted[number] = self._simulation.record.answers[-1]

    def _on_step(self, plan: StepPlan, seconds: float) -> None:
        """Check that a prompt with a row advances after a bounded number of steps that have tokens left for it."""
        starts = dict(zip(plan.rows, plan.starts, strict=True))
        prompts = [
            request.live[0]
            for request in self._scheduler.queues.running
            if request.live[0].num_computed_tokens < request.live[0].num_prompt_tokens
        ]
        has_advanced = any(sequence.row in starts for sequence in prompts)
        has_tokens = sum(plan.counts) < self._scheduler.config.max_num_batched_tokens
        self._num_waits = 0 if has_advanced or not prompts else self._num_waits + has_tokens
        self.longest_wait = max(self.longest_wait, self._num_waits)
        assert self._num_waits < MOST_STEPS, f"no prompt advanced in {self._num_waits} steps"
        if plan.kind == "mixed":
            self.num_over_target += seconds > self._target_s
            self.num_within_target += seconds <= self._target_s
