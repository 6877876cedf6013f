"""Search for the highest rate that meets the limits: doubling until one does not, then bisection.

The rate at which a share of the requests, 90 %, is within the limits is the goodput of Zhong et al. 2024 (DistServe).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

HIGHEST_RATE = 1024.0  # requests per second; beyond it a client would measure itself


class Probed(NamedTuple):
    """One rate that was tried, and how many of its requests met the limits."""

    rate: float
    is_met: bool  # enough of them meet it
    num_met: int
    num_requests: int
    duration_s: float

    def __str__(self) -> str:
        enough = "enough" if self.is_met else "too few"
        return (
            f"{self.rate:.4g} requests/s for {self.duration_s:.1f} s: {self.num_met} of {self.num_requests} met the "
            f"limits, {enough}"
        )


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

    def figures(self, probes: Iterable[Probed]) -> dict[str, Any]:
        """Return what was found, and every probe on the way, for a JSON file."""
        return {"rate": self.best, "missed_rate": self.missed, "probes": [probe._asdict() for probe in probes]}

    def verdict(self, attain: float) -> str:
        """Return the rate in words, and how sure it is; `attain`: the share of requests that met the limits."""
        if self.best is None:
            lowest = "" if self.missed is None else f", down to {self.missed:.4g} requests/s"
            return f"no rate meets the limits{lowest}"
        if self.missed is None:
            return f"at least {self.best:.4g} requests/s meet the limits; higher rates were not tried"
        return (
            f"highest rate at which {attain:.4g} of the requests meet the limits: {self.best:.4g}/s "
            f"(at {self.missed:.4g}/s too few do)"
        )


def num_needed(attain: float, count: int) -> int:
    """Return how many of `count` requests are a share of at least `attain`."""
    return math.ceil(attain * count - 1e-9)  # else 0.07 * 100, a little above 7, would be 8
