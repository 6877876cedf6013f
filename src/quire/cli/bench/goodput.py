"""Limits on what a client sees, and who meets them (Zhong et al. 2024: goodput counts only requests that do)."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from quire.paper.statistics import Timeline


@dataclass(frozen=True, slots=True)
class Limits:
    """The longest times that a request may show, in seconds. None: anything will do.

    ITL is met when no gap between two chunks of the answer is longer. An answer of one token has no ITL and no TPOT.
    """

    ttft_s: float | None = None
    itl_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @property
    def given(self) -> dict[str, float]:
        """The limits that there are, by name."""
        limits = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def are_met_by(self, timeline: Timeline) -> bool:
        """Whether a finished request stayed within every limit."""
        seen = {
            "ttft_s": timeline.ttft_s,
            "itl_s": max(timeline.itl_s, default=0.0),
            "tpot_s": timeline.tpot_s or 0.0,
            "e2e_s": timeline.e2e_s,
        }
        return all(seen[name] <= limit for name, limit in self.given.items())

    def num_met(self, timelines: Sequence[Timeline]) -> int:
        """Return how many of the finished requests stayed within every limit."""
        return sum(self.are_met_by(timeline) for timeline in timelines)
