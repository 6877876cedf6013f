"""Probes of a rate search: a bounded load at each rate, with prompts that the server has not seen."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.cli.bench.find_rate import RateSearch, find_rate
from quire.cli.bench.goodput import Limits
from quire.cli.bench.http_load import SentRequest
from quire.cli.bench.serve import Measured, ServeBench
from quire.paper.arrivals import Schedule, poisson_arrivals
from quire.paper.workloads import WorkItem, renewed

_FEWEST_REQUESTS = 10   # of a probe: a share of fewer says nothing
_SHORTEST_END_S = 10.0  # for the answers to the last arrivals of a short probe
_HIGHEST_RATE = 1024.0  # requests per second; beyond it this client would measure itself


@dataclass(frozen=True, slots=True)
class Probe:
    """One rate, and whether enough requests met the limits. One that missed them was cut short."""

    rate: float
    num_met: int
    is_met: bool
    measured: Measured


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """What every probe has in common."""

    items: list[WorkItem]
    limits: Limits
    attain: float       # share of requests that must meet the limits
    probe_s: float      # of arrivals
    precision: float
    burstiness: float
    max_open: int
    seed: int

    @property
    def limit_s(self) -> float:
        """How long a load may last: what is open then is cut, and has missed the limits."""
        return self.probe_s + max(self.probe_s, _SHORTEST_END_S)

    def num_needed(self, count: int) -> int:
        """Return how many of `count` requests must meet the limits."""
        return math.ceil(self.attain * count - 1e-9)  # else 0.07 * 100, a little above 7, would be 8


@dataclass(slots=True)
class RateFinder:
    """Asks a server at the rates that a search names."""

    bench: ServeBench
    plan: ProbePlan
    on_probe: Callable[[Probe], None]
    probes: list[Probe] = field(default_factory=list)
    num_rounds: int = 0  # over the plan's requests so far

    async def find(self, start: float | None) -> RateSearch:
        """Search from `start` on; return the search, which knows the best rate and the lowest that missed."""
        lowest = _FEWEST_REQUESTS / self.plan.probe_s
        search = RateSearch(start or 1.0, self.plan.precision, lowest, max(_HIGHEST_RATE, lowest))
        await find_rate(search, self._meets_limits)
        return search

    async def _meets_limits(self, rate: float) -> bool | None:
        """Load the server until it is clear whether enough requests meet the limits. None: interrupted."""
        plan, count = self.plan, round(rate * self.plan.probe_s)
        num_needed = plan.num_needed(count)
        enough, num_missed = asyncio.Event(), 0

        def note(request: SentRequest) -> None:
            nonlocal num_missed
            num_missed += not (request.is_finished and plan.limits.are_met_by(request.timeline))
            if num_missed > count - num_needed:
                enough.set()

        await self.bench.drain()
        measured = await self.bench.measure(
            self._new_requests(count),
            Schedule(poisson_arrivals(count, rate, plan.burstiness, plan.seed), plan.max_open),
            on_ended=note,
            enough=enough,
            limit_s=plan.limit_s,
        )
        if self.bench.interrupted.is_set():
            return None
        num_met = plan.limits.num_met(measured.run.timelines)
        self.probes.append(Probe(rate, num_met, num_met >= num_needed, measured))
        self.on_probe(self.probes[-1])
        return self.probes[-1].is_met

    def _new_requests(self, count: int) -> list[WorkItem]:
        items = renewed(self.plan.items, count, self.num_rounds)
        self.num_rounds += math.ceil(count / len(self.plan.items))
        return items
