"""Latency limits, the requests that meet them, and a one-sentence diagnosis when too few do.

Goodput counts only the requests that meet all limits (Zhong et al. 2024). The sentence is made from a few figures of a
run; the first of these rules that fits gives it:
1. Requests failed: their errors come before any speed.
2. TTFT and ITL are within their limits: fine, or the answers are too long for a limit on the whole.
3. Requests were preempted, or the KV cache was full: there are too few blocks for what runs.
4. Only ITL is over its limit: steps are long, as they decode many sequences or carry chunks of prompts.
5. TTFT is over its limit and rises from the first requests to the last: the queue grows, as the rate is above what
   fits. It is said of a full KV cache, too (rule 3).
6. TTFT is over its limit, and requests waited in the queue for most of it: more arrives at times than is served. Where
   the server does not report queue times, waiting requests show the same, if the prompts are short.
7. TTFT is over its limit: a long prompt takes that long to compute or is admitted late; for a short one, steps are
   slow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from quire_lab.sim.statistics import Timeline, distribution

TTFT_LIMIT_S = 0.5   # where a run has no limits of its own: what a reader takes for an immediate answer,
ITL_LIMIT_S = 0.05   # and for a fluent one
_LONG_PROMPT = 1024  # tokens
_FULL = 0.95         # share of the KV blocks
_HALF_FULL = 0.5
_FEWEST = 10         # requests
_OVERLOAD = "the queue grows: the rate is above what fits"
_GROWTH = 0.1        # seconds of TTFT per second of arrivals; some 10 % more arrives than is served


@dataclass(frozen=True, slots=True)
class LatencyLimits:
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
        """Return whether a finished request stayed within every limit."""
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


@dataclass(frozen=True, slots=True)
class Observation:
    """Input of the diagnosis: typical figures of requests, and what the server reported, if anything."""

    num_prompt_tokens: float
    ttft_s: float
    itl_s: float
    ttft_limit_s: float = TTFT_LIMIT_S
    itl_limit_s: float = ITL_LIMIT_S
    queue_s: float | None = None
    mean_waiting: float | None = None
    num_preemptions: int = 0
    peak_kv_usage: float | None = None
    num_failed: int = 0
    is_too_long: bool = False  # over a limit on the whole request
    mean_ttft_s: float | None = None  # what `queue_s`, a mean, is a part of; None: `ttft_s`
    is_queue_growing: bool = False


def observe(
    timelines: Sequence[Timeline], prompt_lens: Sequence[int], limits: LatencyLimits, **reported: Any  # noqa: ANN401 (fields)
) -> Observation:
    """Return what finished requests show: 95th percentiles of what the limits are on, and the prompts of late requests.

    `reported`: fields of the observation that the server, or the simulator, knows.
    """
    ttft_limit_s = limits.given.get("ttft_s", TTFT_LIMIT_S)
    ttft_s = distribution([timeline.ttft_s for timeline in timelines])
    late = [num for num, timeline in zip(prompt_lens, timelines, strict=True) if timeline.ttft_s > ttft_limit_s]
    return Observation(
        num_prompt_tokens=float(np.median(late or prompt_lens)),
        ttft_s=ttft_s.p95,
        mean_ttft_s=ttft_s.mean,
        is_queue_growing=is_queue_growing(timelines, ttft_limit_s),
        itl_s=_limited_gap_s(timelines, limits),
        ttft_limit_s=ttft_limit_s,
        itl_limit_s=limits.given.get("itl_s", limits.given.get("tpot_s", ITL_LIMIT_S)),
        is_too_long=limits.e2e_s is not None
        and distribution([timeline.e2e_s for timeline in timelines]).p95 > limits.e2e_s,
        **reported,
    )


def is_queue_growing(timelines: Sequence[Timeline], ttft_limit_s: float) -> bool:
    """Return whether more arrives than is served: TTFT rises by more than its limit over the later half of requests.

    The first half fills the batch. The rise is that of the line fitted to TTFT by the time of sending, and counts if it
    is above a tenth of the half's seconds. Of requests that were all sent at once it is from the lowest to the highest.
    Few requests show no trend.
    """
    if len(timelines) < _FEWEST:
        return False
    sent_s, ttft_s = np.array(sorted((timeline.sent_s, timeline.ttft_s) for timeline in timelines)).T
    later = slice(len(sent_s) // 2 if np.ptp(sent_s) else 0, None)
    sent_s, ttft_s = sent_s[later] - sent_s[later][0], ttft_s[later]
    span_s = float(sent_s[-1])
    rise_s = float(np.polyfit(sent_s / span_s, ttft_s, 1)[0] if span_s else np.ptp(ttft_s))
    return rise_s > max(ttft_limit_s, _GROWTH * span_s)


def _limited_gap_s(timelines: Sequence[Timeline], limits: LatencyLimits) -> float:
    """Return the 95th percentile of the gaps as the limits count them; without limits, of all gaps."""
    if limits.itl_s is not None:
        sample = [max(timeline.itl_s, default=0.0) for timeline in timelines]
    elif limits.tpot_s is not None:
        sample = [timeline.tpot_s or 0.0 for timeline in timelines]
    else:
        sample = [gap for timeline in timelines for gap in timeline.itl_s]
    return distribution(sample).p95 if sample else 0.0


def diagnose(seen: Observation) -> str:
    """Return the sentence."""
    if seen.num_failed:
        return f"{seen.num_failed} requests failed: look at the errors before any figure."
    return f"{_advice(seen)}: {_figures(seen)}."


def _advice(seen: Observation) -> str:
    is_late = seen.ttft_s > seen.ttft_limit_s
    if not is_late and seen.itl_s <= seen.itl_limit_s:
        return "Answers are too long for the limit on the whole request" if seen.is_too_long else "Fine"
    if seen.num_preemptions or (seen.peak_kv_usage or 0.0) >= _FULL:
        overload = f", {_OVERLOAD};" if is_late and seen.is_queue_growing else ":"
        return f"KV cache full{overload} look at the KV budget, or let fewer sequences run together"
    if is_late:
        return _late_advice(seen)
    has_spare_blocks = seen.peak_kv_usage is not None and seen.peak_kv_usage < _HALF_FULL
    kv_budget = "" if has_spare_blocks else "the KV budget, and at "
    return f"Decode pressure: look at {kv_budget}how many sequences share a step"


def _late_advice(seen: Observation) -> str:
    if seen.is_queue_growing:
        return f"Queueing, {_OVERLOAD}; look at the rate, and at how many sequences may run together"
    is_long = seen.num_prompt_tokens >= _LONG_PROMPT
    has_waited = not is_long and (seen.mean_waiting or 0.0) > 0
    mean_ttft_s = seen.ttft_s if seen.mean_ttft_s is None else seen.mean_ttft_s
    if has_waited if seen.queue_s is None else seen.queue_s > mean_ttft_s / 2:
        return "Queueing: at times more arrives than is served; look at bursts, and at how many sequences run together"
    if is_long:
        return "Long prompts start late: look at prefill admission and chunking"
    return "Short prompts start late: look at how long steps take, and at what shares them"


def _figures(seen: Observation) -> str:
    parts = [
        f"prompts of {seen.num_prompt_tokens:.0f} tokens",
        f"TTFT {seen.ttft_s * 1e3:.0f} ms of {seen.ttft_limit_s * 1e3:.0f}",
        f"ITL {seen.itl_s * 1e3:.0f} ms of {seen.itl_limit_s * 1e3:.0f}",
    ]
    if seen.num_preemptions:
        parts.append(f"{seen.num_preemptions} preemptions")
    if seen.peak_kv_usage is not None:
        parts.append(f"{seen.peak_kv_usage:.0%} of the KV cache in use at most")
    return ", ".join(parts)
