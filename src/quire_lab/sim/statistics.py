"""Summary statistics of measurements. Times are in seconds; no clock is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class Distribution(NamedTuple):
    """A sample's mean and percentiles (linear between neighbours)."""

    mean: float
    p50: float
    p95: float
    p99: float


class Spread(NamedTuple):
    """Repeats of one measurement."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Times at which one request was sent and each of its output tokens arrived, on one clock.

    A stream may bring several tokens in one chunk: then `token_times_s` has the chunk's time once, and `num_tokens` is
    the number of all. ITL is over the gaps that a client sees, between chunks; TPOT is over tokens.
    """

    sent_s: float
    token_times_s: list[float]
    num_tokens: int | None = None  # None: as many as there are times

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first token."""
        return self.token_times_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Seconds from sending to the last token."""
        return self.token_times_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None where there is only one."""
        num_gaps = (len(self.token_times_s) if self.num_tokens is None else self.num_tokens) - 1
        return (self.e2e_s - self.ttft_s) / num_gaps if num_gaps > 0 else None

    @property
    def itl_s(self) -> list[float]:
        """Each gap between tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_times_s)]


def distribution(sample: Sequence[float]) -> Distribution:
    """Return the mean and percentiles of a sample that is not empty."""
    p50, p95, p99 = np.percentile(sample, [50, 95, 99])
    return Distribution(float(np.mean(sample)), float(p50), float(p95), float(p99))


def spread(repeats: Sequence[float]) -> Spread:
    """Return the median and the extremes of at least one repeat."""
    return Spread(float(np.median(repeats)), min(repeats), max(repeats))


def latencies(timelines: Sequence[Timeline]) -> dict[str, Distribution]:
    """Return the distributions of TTFT, ITL (pooled over tokens), TPOT and end to end (one per request), by name.

    ITL and TPOT are absent when no answer has a second token.
    """
    samples = {
        "ttft_s": [timeline.ttft_s for timeline in timelines],
        "itl_s": [gap for timeline in timelines for gap in timeline.itl_s],
        "tpot_s": [timeline.tpot_s for timeline in timelines if timeline.tpot_s is not None],
        "e2e_s": [timeline.e2e_s for timeline in timelines],
    }
    return {name: distribution(sample) for name, sample in samples.items() if sample}


def jain_index(shares: Sequence[float]) -> float:
    """Return how equal some shares are (Jain et al. 1984): 1 if all are the same, 1 / n if one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0
