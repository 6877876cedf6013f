"""Arrival times of requests, in seconds from the start. Seeded; no clock is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from quire.core.errors import ConfigError
from quire_lab.sim.workloads import WorkItem

ArrivalKind = Literal["trace", "poisson", "burst", "closed"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Due time of each request, in order, and the most that may be open at once.

    Without due times it is a closed loop: `max_open` clients, each asking anew when it is answered.
    """

    due_s: list[float] | None
    max_open: int

    @property
    def offered_rps(self) -> float | None:
        """Requests per second that are due; None for a burst, a single request and a closed loop."""
        if not self.due_s or self.due_s[-1] == self.due_s[0]:
            return None
        return (len(self.due_s) - 1) / (self.due_s[-1] - self.due_s[0])


def poisson_arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return times with gaps of mean 1 / rate, the first at 0.

    `burstiness` is the shape of the gaps' gamma distribution: 1 is Poisson's process, less is burstier (coefficient of
    variation 1 / sqrt(shape)), more is steadier. The gaps drawn are scaled to exactly that mean: ten
    requests could otherwise have half the rate asked for, or twice.
    """
    gaps = np.random.default_rng(seed).standard_gamma(burstiness, size=count)
    times = np.cumsum(gaps) - gaps[0]
    if times[-1] > 0:
        times *= (count - 1) / (rate * times[-1])
    return times.tolist()  # type: ignore[no-any-return]


def trace_arrivals(items: Sequence[WorkItem]) -> list[float]:
    """Return the workload's own times. Raises ConfigError when it is no trace."""
    times = [item.arrival_s for item in items if item.arrival_s is not None]
    if len(times) != len(items):
        raise ConfigError("arrivals trace needs a workload with arrival times: a .jsonl file, or a .csv with arrival_s")
    return times
