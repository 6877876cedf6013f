"""Probes of a server at the rates of a search: a bounded load at each, of prompts that the server has not seen."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from quire_lab.bench.bench_flags import ArrivalFlags, SearchFlags
from quire_lab.bench.diagnosis import LatencyLimits
from quire_lab.bench.http_load import SentRequest
from quire_lab.bench.server import MeasuredLoad, ServerUnderTest
from quire_lab.sim.rate_search import HIGHEST_RATE, Probed, RateSearch, num_needed
from quire_lab.sim.workloads import Schedule, WorkItem, poisson_arrivals, renewed

_FEWEST_REQUESTS = 10   # requests of a probe: a share of fewer says nothing
_SHORTEST_END_S = 10.0  # for the answers to the last arrivals of a short probe


@dataclass(frozen=True, slots=True)
class Probe:
    """One rate, and whether enough requests met the limits. One that missed them was cut short."""

    rate: float
    num_met: int
    is_met: bool
    measured: MeasuredLoad

    @property
    def figures(self) -> Probed:
        """The rate and its requests, without what was measured."""
        run = self.measured.run
        return Probed(self.rate, self.is_met, self.num_met, run.num_due, run.duration_s)


@dataclass(slots=True)
class RateFinder:
    """Probes of a server at the rates of a search: Poisson arrivals, at most `max_open` requests at once."""

    server: ServerUnderTest
    items: list[WorkItem]
    limits: LatencyLimits
    search: SearchFlags
    arrivals: ArrivalFlags
    max_open: int
    seed: int
    on_probe: Callable[[Probe], None]
    probes: list[Probe] = field(default_factory=list)
    num_rounds: int = 0  # over the requests so far

    async def find(self) -> RateSearch:
        """Search until the rate is known, or Ctrl-C; return it, with the best rate and the lowest that missed."""
        lowest = _FEWEST_REQUESTS / self.search.probe_s
        search = RateSearch(self.arrivals.rate or 1.0, self.search.precision, lowest, max(HIGHEST_RATE, lowest))
        while (rate := search.next_rate()) is not None:
            probe = await self._probe(rate)
            if self.server.interrupted.is_set():
                break
            search.record(rate, is_met=probe.is_met)
            self.probes.append(probe)
            self.on_probe(probe)
        return search

    async def _probe(self, rate: float) -> Probe:
        """Load the server until it is clear whether enough requests meet the limits; what is open at the end missed."""
        count, probe_s = round(rate * self.search.probe_s), self.search.probe_s
        needed = num_needed(self.search.attain, count)
        num_missed = 0

        def is_enough(request: SentRequest) -> bool:
            nonlocal num_missed
            num_missed += not (request.is_finished and self.limits.are_met_by(request.timeline))
            return num_missed > count - needed

        items = renewed(self.items, count, self.num_rounds)
        self.num_rounds += math.ceil(count / len(self.items))
        await self.server.drain()
        measured = await self.server.measure(
            items,
            Schedule(poisson_arrivals(count, rate, self.arrivals.burstiness, self.seed), self.max_open),
            is_enough=is_enough,
            limit_s=probe_s + max(probe_s, _SHORTEST_END_S),
        )
        num_met = self.limits.num_met(measured.run.timelines)
        return Probe(rate, num_met, num_met >= needed, measured)
