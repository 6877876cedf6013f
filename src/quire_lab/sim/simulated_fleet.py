"""Serving by several engines on a virtual clock: the real router in front of real schedulers and caches.

Each engine has a machine of its own, and its own clock. Events are handled in the order of their times, and the router
learns of a step when it has ended, as the server does.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from operator import itemgetter

from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.deltas import WaitReason
from quire.engine.fleet.router import Router, Routing
from quire_lab.sim.hardware import CostModel
from quire_lab.sim.simulation import SimulatedRun, SimulatedStep, Simulation, as_request, paged_scheduler
from quire_lab.sim.workloads import WorkItem


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
