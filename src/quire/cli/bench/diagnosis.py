"""Latency limits, the requests that meet them, and a one-sentence diagnosis when too few do.

Goodput counts only the requests that meet all limits (Zhong et al. 2024). The sentence is made from a few figures of a
run; the first of these rules that fits gives it:
1. Requests failed: their errors come before any speed.
2. TTFT and ITL are within their limits: fine, or the answers are too long for a limit on the whole.
3. Requests were preempted, or the KV cache was full: there are too few blocks for what runs.
4. Only ITL is over its limit: steps are long, as they decode many sequences or carry chunks of prompts.
5. TTFT is over its limit, and requests waited in the queue for most of it: more arrives than is served. Where the
   server does not report queue times, waiting requests show the same, if the prompts are short.
6. TTFT is over its limit: a long prompt takes that long to compute or is admitted late; for a short one, steps are
   slow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from quire.sim.statistics import Timeline, distribution

TTFT_LIMIT_S = 0.5   # where a run has no limits of its own: what a reader takes for an immediate answer,
ITL_LIMIT_S = 0.05   # and for a fluent one
_LONG_PROMPT = 1024  # tokens
_FULL = 0.95         # of the KV blocks
_HALF_FULL = 0.5


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


def observe(
    timelines: Sequence[Timeline], prompt_lens: Sequence[int], limits: LatencyLimits, **reported: Any  # noqa: ANN401 (fields)
) -> Observation:
    """Return what finished requests show: 95th percentiles of what the limits are on, and the prompts of late requests.

    `reported`: fields of the observation that the server, or the simulator, knows.
    """
    ttft_limit_s = limits.ttft_s or TTFT_LIMIT_S
    late = [num for num, timeline in zip(prompt_lens, timelines, strict=True) if timeline.ttft_s > ttft_limit_s]
    return Observation(
        num_prompt_tokens=float(np.median(late or prompt_lens)),
        ttft_s=distribution([timeline.ttft_s for timeline in timelines]).p95,
        itl_s=_limited_gap_s(timelines, limits),
        ttft_limit_s=ttft_limit_s,
        itl_limit_s=limits.itl_s or limits.tpot_s or ITL_LIMIT_S,
        is_too_long=limits.e2e_s is not None
        and distribution([timeline.e2e_s for timeline in timelines]).p95 > limits.e2e_s,
        **reported,
    )


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
    is_late, is_long = seen.ttft_s > seen.ttft_limit_s, seen.num_prompt_tokens >= _LONG_PROMPT
    if not is_late and seen.itl_s <= seen.itl_limit_s:
        return "Answers are too long for the limit on the whole request" if seen.is_too_long else "Fine"
    if seen.num_preemptions or (seen.peak_kv_usage or 0.0) >= _FULL:
        return "KV cache full: look at the KV budget, or let fewer sequences run together"
    if not is_late:
        has_spare_blocks = seen.peak_kv_usage is not None and seen.peak_kv_usage < _HALF_FULL
        kv_budget = "" if has_spare_blocks else "the KV budget, and at "
        return f"Decode pressure: look at {kv_budget}how many sequences share a step"
    has_waited = not is_long and (seen.mean_waiting or 0.0) > 0
    if has_waited if seen.queue_s is None else seen.queue_s > seen.ttft_s / 2:
        return "Queueing: more arrives than is served; look at the rate, and at how many sequences may run together"
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
