"""The highest rate that meets the limits: doubling until one does not, then bisection. Measures nothing itself."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(slots=True)
class RateSearch:
    """Which rate to try next. Takes for granted that a rate above a missed one is missed as well."""

    start: float
    precision: float             # stop when the interval is this narrow, relative to its lower end
    lowest: float                # below it a probe has too few requests to judge by
    highest: float
    best: float | None = None    # the highest rate that met the limits
    missed: float | None = None  # the lowest that did not

    def next_rate(self) -> float | None:
        """Return the next rate to try, or None when the search is over."""
        if self.best is None and self.missed is None:
            return self._within(self.start)
        if self.missed is None:
            return self._within(self.best * 2) if self.best < self.highest else None  # type: ignore[operator]
        if self.best is None:
            return self._within(self.missed / 2) if self.missed > self.lowest else None
        if self.missed <= self.best * (1 + self.precision):
            return None
        return (self.best + self.missed) / 2

    def record(self, rate: float, *, is_met: bool) -> None:
        """Take down what a probe has shown."""
        if is_met:
            self.best = rate if self.best is None else max(rate, self.best)
            return
        self.missed = rate if self.missed is None else min(rate, self.missed)

    def _within(self, rate: float) -> float:
        return min(max(rate, self.lowest), self.highest)


async def find_rate(search: RateSearch, measure: Callable[[float], Awaitable[bool | None]]) -> float | None:
    """Return the highest rate that meets the limits; None when none does. A measure of None ends the search early."""
    while (rate := search.next_rate()) is not None:
        is_met = await measure(rate)
        if is_met is None:
            break
        search.record(rate, is_met=is_met)
    return search.best
