"""Serving on a virtual clock: requests arrive, the real scheduler and cache plan, a cost model gives the time.

What is simulated is time and tokens; every decision is the engine's own. In a fleet each engine has a machine and a
clock of its own, and the real router is in front of them. Events are handled in the order of their times, and the
router learns of a step when it has ended, as the server does.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import accumulate, count, pairwise
from operator import itemgetter
from random import Random
from typing import NamedTuple, Protocol

import numpy as np

from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.deltas import Admission, SequenceDelta, TokenLogprobs, WaitReason
from quire.core.errors import InvalidRequestError
from quire.core.plan import UNMEASURED, GraphCounts, MeasuredRates, NewRow, StepPlan, StepResult
from quire.core.pooling import GENERATE, BeamTask
from quire.core.sampling_params import BeamSearchParams, SamplingParams, as_sampling_params, num_candidates
from quire.core.sequence import Request
from quire.core.token_ids import pack_tokens
from quire.engine.engine import Engine
from quire.engine.fleet.router import Router, Routing
from quire.execution.executor import Executor
from quire.execution.step_timer import StepTimer
from quire.scheduling.scheduler import Scheduler, make_scheduler
from quire_lab.sim.hardware import CostModel
from quire_lab.sim.statistics import Timeline
from quire_lab.sim.workloads import WorkItem

CANDIDATE_GAP = 1.5  # mean difference between consecutive logprobs of a beam's likeliest tokens


class SimulatedExecutor:
    """Returns the result of every plan at once; `now_s` is the virtual time at which the last one was ready.

    `step_s` returns the seconds of a plan, `swap_s` those of a number of swapped blocks. `on_step` is called with each
    plan and its seconds between schedule and update, while the plan holds its blocks.
    """

    max_steps_in_flight, graphs = 1, GraphCounts()
    now_s = 0.0

    def __init__(
        self,
        step_s: Callable[[StepPlan], float],
        swap_s: Callable[[int], float] = lambda num_blocks: 0.0,
        rates: MeasuredRates = UNMEASURED,
        timer: StepTimer | None = None,
    ) -> None:
        self._step_s, self._swap_s, self._rates, self._timer = step_s, swap_s, rates, timer
        self.on_step: Callable[[StepPlan, float], None] = lambda plan, seconds: None
        self._random = Random(0)  # noqa: S311 (a simulation)
        self._beams: dict[int, NewRow] = {}  # rows of beam searches
        self._plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        """Queue the plan."""
        self._plans.append(plan)

    def collect(self) -> StepResult:
        """Advance the clock to the end of the oldest plan."""
        plan = self._plans.pop(0)
        for new in plan.new_rows:
            self._beams.pop(new.row, None)
            if new.beam is not None:
                self._beams[new.row] = new
        seconds = self._step_s(plan)
        self.now_s += seconds
        rates, ratio = self._rates, None
        if self._timer is not None:
            rates = rates._replace(step_times=self._timer.times)  # the steps before give them, as in a worker
            starts = np.array(plan.starts, dtype=np.int64)
            ratio = self._timer.record(starts, starts + np.array(plan.counts), len(plan.sample_rows), seconds)
        self.on_step(plan, seconds)
        num_swapped = len(plan.swap_outs) + len(plan.swap_ins)
        return StepResult(
            token_ids=plan.sample_rows,
            logprobs=[self._candidates(row) for row in plan.sample_rows] if self._beams else None,
            swap_s=self._swap_s(num_swapped) if num_swapped else 0.0,
            rates=rates,
            step_s=seconds,
            step_ratio=ratio,
        )

    def _candidates(self, row: int) -> TokenLogprobs | None:
        """Return random likeliest tokens of a beam, after the sampled one, with random logprobs."""
        new = self._beams.get(row)
        if new is None or new.beam is None:
            return None
        num = num_candidates(new.beam, len(new.eos_token_ids))
        logprobs = list(accumulate(-self._random.expovariate(1 / CANDIDATE_GAP) for _ in range(num)))
        ids = self._random.sample(range(32_000), num)
        return TokenLogprobs([ids[0], *ids], [logprobs[0], *logprobs], [1, *range(1, num + 1)])


@dataclass(slots=True)
class Answer:
    """Record of one request in the simulation. Tokens are those of its first branch, of a beam search none."""

    item: WorkItem
    arrival_s: float
    num_open: int = 1                                      # branches that have not ended
    steps: list[int] = field(default_factory=list)         # steps that brought a token, by their numbers
    admitted_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0

    @property
    def normalized_latency_s(self) -> float:
        """End to end over output length: the paper's metric (Kwon et al. 2023, section 6.1)."""
        assert self.finished_s is not None, "not finished"
        return (self.finished_s - self.arrival_s) / self.item.output_len


class RecordedStep(NamedTuple):
    """One step, as it was between schedule and update: what it computes has its blocks."""

    seconds: float
    num_sequences: int
    num_running: int      # requests
    kv_usage: float       # share of the KV blocks in use
    has_prefill: bool


@dataclass(slots=True)
class SimulatedRun:
    """Result of a simulation. Means are over time: a step counts by its seconds."""

    answers: list[Answer] = field(default_factory=list)    # accepted requests, in order of arrival
    num_refused: int = 0                                   # could never run
    steps: list[RecordedStep] = field(default_factory=list)
    step_ends_s: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    num_computed_tokens: int = 0

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last token."""
        return max(self.step_ends_s, default=0.0)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens of finished requests that the prefix cache had."""
        num_prompt_tokens = sum(len(answer.item.prompt_token_ids) for answer in self.finished)
        return sum(answer.num_cached_tokens for answer in self.finished) / num_prompt_tokens

    @property
    def finished(self) -> list[Answer]:
        """Requests that were answered."""
        return [answer for answer in self.answers if answer.finished_s is not None]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second, of first branches."""
        return sum(answer.item.output_len for answer in self.finished) / self.duration_s

    @property
    def num_sequence_steps(self) -> int:
        """Sequences, summed over steps."""
        return sum(step.num_sequences for step in self.steps)

    @property
    def mean_kv_usage(self) -> float:
        """Share of the KV blocks in use while anything ran."""
        return self._mean([step.kv_usage for step in self.steps])

    @property
    def peak_kv_usage(self) -> float:
        """The largest share of the KV blocks that was in use."""
        return max((step.kv_usage for step in self.steps), default=0.0)

    @property
    def mean_batched_requests(self) -> float:
        """Requests that share a step, while anything ran (figure 13)."""
        return self._mean([step.num_running for step in self.steps])

    @property
    def normalized_latency_s(self) -> float:
        """Mean over finished requests."""
        return sum(answer.normalized_latency_s for answer in self.finished) / len(self.finished)

    @property
    def mean_queue_s(self) -> float:
        """Mean seconds from arrival to the first step with a token of the request."""
        admitted = [answer.admitted_s - answer.arrival_s for answer in self.answers if answer.admitted_s is not None]
        return sum(admitted) / len(admitted) if admitted else 0.0

    def timeline(self, answer: Answer) -> Timeline:
        """Return the arrival time of a request and the times of its tokens."""
        return Timeline(answer.arrival_s, [self.step_ends_s[step] for step in answer.steps])

    def itl_s(self, *, beside_prefill: bool) -> list[float]:
        """Return the gaps between tokens during which some prompt was computed, or the rest."""
        ends_s, num_prefills = self.step_ends_s, list(accumulate(step.has_prefill for step in self.steps))
        return [
            ends_s[later] - ends_s[earlier]
            for answer in self.finished
            for earlier, later in pairwise(answer.steps)
            if (num_prefills[later] > num_prefills[earlier]) == beside_prefill
        ]

    def _mean(self, values: Sequence[float]) -> float:
        """Return the mean over time of a value that every step has."""
        times_s = [step.seconds for step in self.steps]
        return sum(value * seconds for value, seconds in zip(values, times_s, strict=True)) / (sum(times_s) or 1.0)


class SimulatedStep(NamedTuple):
    """Report of an engine's step, and its time."""

    ended_s: float
    admissions: list[Admission]
    deltas: list[SequenceDelta]


class ClockedExecutor(Executor, Protocol):
    """An executor with a clock, which advances with every step, and to the next arrival where nothing runs."""

    now_s: float
    on_step: Callable[[StepPlan, float], None]  # sees each plan and its seconds before its result


class Simulation:
    """One engine on a clock: a virtual one, by a cost model, or that of a real executor.

    `scheduler` may be any that the engine takes, over any cache with the methods of its own.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cost: CostModel | ClockedExecutor,
        on_step: Callable[[StepPlan, float], None] | None = None,
    ) -> None:
        self._scheduler, self._on_step = scheduler, on_step
        if isinstance(cost, CostModel):
            timer = StepTimer() if scheduler.planner.time.has_target else None
            cost = SimulatedExecutor(cost.step_s, cost.swap_s, cost.rates, timer)
        self._executor: ClockedExecutor = cost
        self._executor.on_step = self._observe
        self._engine = Engine(scheduler, self._executor, clock=lambda: self._executor.now_s)
        self.record = SimulatedRun()
        self._answers: dict[int, Answer] = {}

    def run(
        self, items: Iterable[WorkItem], due_s: Sequence[float], n: int = 1, beam_width: int | None = None
    ) -> SimulatedRun:
        """Ask every item when it is due, and go on until all are answered: `n` branches each, or a beam search.

        What could never run is refused and counted.
        """
        arrivals = deque(sorted(zip(due_s, count(), items), key=itemgetter(0)))
        while arrivals or self.has_requests:
            now_s = self.now_s if self.has_requests else max(self.now_s, arrivals[0][0])
            while arrivals and arrivals[0][0] <= now_s:
                due, number, item = arrivals.popleft()
                self.add(as_request(number, item, n, beam_width), item, due)
            if self.has_requests:
                self.step()
        return self.finish()

    @property
    def has_requests(self) -> bool:
        """True if a request waits or runs."""
        return self._scheduler.has_requests

    @property
    def now_s(self) -> float:
        """The end of the last step, or the arrival of the first request after an idle time."""
        return self._executor.now_s

    def add(self, request: Request, item: WorkItem, due_s: float) -> bool:
        """Queue a request that is due; return False, and count it, if it could never run."""
        if not self.has_requests:
            self._executor.now_s = max(self._executor.now_s, due_s)
        try:
            self._engine.add(request, self._executor.now_s - due_s)
        except InvalidRequestError:
            self.record.num_refused += 1
            return False
        self._answers[request.request_id] = answer = Answer(item, due_s, num_open=request.params.n)
        self.record.answers.append(answer)
        return True

    def finish(self) -> SimulatedRun:
        """Return the record of everything so far."""
        self.record.num_preemptions = sum(self._scheduler.preemption.stats.num_preemptions.values())
        return self.record

    def step(self) -> SimulatedStep:
        """Run one step, record it, and return the engine's report."""
        answers, step_ends_s = self._answers, self.record.step_ends_s
        number, started_s = len(step_ends_s), self._executor.now_s
        deltas = self._engine.step()
        now_s = self._executor.now_s
        step_ends_s.append(now_s)
        for delta in deltas:
            answer = answers[delta.request_id]
            if delta.index == 0:
                answer.steps.append(number)
            if delta.finish_reason is not None:
                answer.num_open -= 1
                if not answer.num_open:
                    answer.finished_s = now_s
        for admission in self._engine.admissions:
            answer = answers[admission.request_id]
            answer.num_preemptions = admission.num_preemptions
            if not admission.num_preemptions:
                answer.num_cached_tokens = admission.num_cached_tokens
                answer.admitted_s = started_s
        return SimulatedStep(now_s, self._engine.admissions, deltas)

    def _observe(self, plan: StepPlan, seconds: float) -> None:
        cache, num_sequences = self._scheduler.cache, len(plan.rows)
        kv_usage = 1 - cache.num_free_blocks / cache.num_blocks
        has_prefill = max(plan.counts) > 1
        self.record.num_computed_tokens += sum(plan.counts)
        num_running = len(self._scheduler.queues.running)
        self.record.steps.append(RecordedStep(seconds, num_sequences, num_running, kv_usage, has_prefill))
        if self._on_step is not None:
            self._on_step(plan, seconds)


def as_request(number: int, item: WorkItem, n: int = 1, beam_width: int | None = None) -> Request:
    """Return an item as the engine would make it: exactly its output length, whatever is drawn."""
    beam = None if beam_width is None else BeamSearchParams(beam_width, item.output_len, ignore_eos=True)
    params = SamplingParams(n=n, temperature=1.0, ignore_eos=True, max_tokens=item.output_len, detokenize=False)
    return Request(
        number,
        pack_tokens(item.prompt_token_ids),
        params if beam is None else as_sampling_params(beam),
        seed=number,
        max_tokens=item.output_len,
        task=GENERATE if beam is None else BeamTask(beam),
        client_id=item.client_id,
    )


def paged_scheduler(cache: CacheConfig, config: SchedulerConfig) -> Scheduler:
    """Return Quire's own scheduler over its own cache."""
    return make_scheduler(config, cache)


@dataclass(slots=True)
class FleetRun:
    """Result of a simulation of several engines."""

    engines: list[SimulatedRun] = field(default_factory=list)

    @property
    def whole(self) -> SimulatedRun:
        """One record of all engines: steps one engine after the other, answers in order of arrival."""
        whole = SimulatedRun()
        for run in self.engines:
            first = len(whole.steps)
            whole.answers += [replace(each, steps=[step + first for step in each.steps]) for each in run.answers]
            whole.steps += run.steps
            whole.step_ends_s += run.step_ends_s
            whole.num_refused += run.num_refused
            whole.num_preemptions += run.num_preemptions
            whole.num_computed_tokens += run.num_computed_tokens
        whole.answers.sort(key=lambda answer: answer.arrival_s)
        return whole

    @property
    def imbalance(self) -> float:
        """The most tokens that an engine has computed, over the mean."""
        num_tokens = [run.num_computed_tokens for run in self.engines]
        return max(num_tokens) * len(num_tokens) / sum(num_tokens)


class FleetSimulation:
    """Several engines alike, with the same costs, and a rule that routes requests to them."""

    def __init__(
        self, num_engines: int, cache: CacheConfig, config: SchedulerConfig, cost: CostModel,
        routing: Routing = "prefix",
    ) -> None:  # fmt: skip
        self.router = Router([cache.num_blocks] * num_engines, cache.block_size, config.max_num_seqs, routing)
        self._schedulers = [paged_scheduler(cache, config) for _ in range(num_engines)]
        self._engines = [Simulation(scheduler, cost) for scheduler in self._schedulers]
        # A heap of reports to deliver: end of the step, order, engine, report, and of the cache and the queue what the
        # router takes: blocks evicted so far, those in use, why the next request waits.
        self._reports: list[tuple[float, int, int, SimulatedStep, tuple[int, int, WaitReason | None]]] = []
        self._order = count()

    def run(self, items: Iterable[WorkItem], due_s: Sequence[float]) -> FleetRun:
        """Ask every item when it is due, and go on until all are answered."""
        arrivals = deque(sorted(zip(due_s, count(), items), key=itemgetter(0)))
        while True:
            busy = [(engine.now_s, number) for number, engine in enumerate(self._engines) if engine.has_requests]
            if arrivals and (not busy or arrivals[0][0] <= min(busy)[0]):
                self._add(*arrivals.popleft())
            elif busy:
                self._step(min(busy)[1])
            else:
                break
        return FleetRun([engine.finish() for engine in self._engines])

    def _add(self, due_s: float, number: int, item: WorkItem) -> None:
        self._deliver(due_s)
        request = as_request(number, item)
        if not self._engines[self.router.route(request)].add(request, item, due_s):
            self.router.forget(request.request_id)

    def _step(self, number: int) -> None:
        report = self._engines[number].step()
        scheduler = self._schedulers[number]
        stats = scheduler.cache.stats()
        state = stats.evicted_blocks, stats.used_blocks, scheduler.queues.wait_reasons.current
        heappush(self._reports, (report.ended_s, next(self._order), number, report, state))

    def _deliver(self, now_s: float) -> None:
        """Let the router learn of the steps that have ended."""
        while self._reports and self._reports[0][0] <= now_s:
            _, _, number, report, state = heappop(self._reports)
            self.router.on_step(number, report.admissions, report.deltas, *state)
