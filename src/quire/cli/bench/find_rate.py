"""Search for the highest rate that meets the limits: doubling until one does not, then bisection.

Each rate is probed with a bounded load, of prompts that the server has not seen.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.cli.bench.diagnosis import LatencyLimits
from quire.cli.bench.flags import ArrivalFlags, SearchFlags
from quire.cli.bench.http_load import SentRequest
from quire.cli.bench.server import Measured, ServerUnderTest
from quire.sim.arrivals import Schedule, poisson_arrivals
from quire.sim.workloads import WorkItem, renewed

_FEWEST_REQUESTS = 10   # of a probe: a share of fewer says nothing
_SHORTEST_END_S = 10.0  # for the answers to the last arrivals of a short probe
_HIGHEST_RATE = 1024.0  # requests per second; beyond it this client would measure itself


@dataclass(slots=True)
class RateSearch:
    """Search for the highest rate: the next one is above the best and below the lowest one that missed."""

    start: float
    precision: float             # stop when the interval is this narrow, relative to its lower end
    lowest: float                # below it a probe has too few requests to judge by
    highest: float
    best: float | None = None    # the highest rate that met the limits
    missed: float | None = None  # the lowest that did not

    def next_rate(self) -> float | None:
        """Return the next rate to try, or None when the search is over."""
        if self.best is not None and self.missed is not None:
            is_close = self.missed <= self.best * (1 + self.precision)
            return None if is_close else (self.best + self.missed) / 2
        rate = self.start
        if self.best is not None:
            rate = self.best * 2
        elif self.missed is not None:
            rate = self.missed / 2
        rate = min(max(rate, self.lowest), self.highest)
        return None if rate in (self.best, self.missed) else rate

    def record(self, rate: float, *, is_met: bool) -> None:
        """Take down what a probe has shown."""
        if is_met:
            self.best = rate
        else:
            self.missed = rate


@dataclass(frozen=True, slots=True)
class Probe:
    """One rate, and whether enough requests met the limits. One that missed them was cut short."""

    rate: float
    num_met: int
    is_met: bool
    measured: Measured


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
        search = RateSearch(self.arrivals.rate or 1.0, self.search.precision, lowest, max(_HIGHEST_RATE, lowest))
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
        num_needed = math.ceil(self.search.attain * count - 1e-9)  # else 0.07 * 100, a little above 7, would be 8
        num_missed = 0

        def is_enough(request: SentRequest) -> bool:
            nonlocal num_missed
            num_missed += not (request.is_finished and self.limits.are_met_by(request.timeline))
            return num_missed > count - num_needed

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
        return Probe(rate, num_met, num_met >= num_needed, measured)
