"""One sentence on where to look first, from a few figures of a run, by plain rules.

In order; the first that fits speaks:
1. Requests failed: their errors come before any speed.
2. TTFT and ITL are within their limits: fine, or the answers are too long for a limit on the whole.
3. Requests were preempted, or the KV cache was full: there are too few blocks for what runs.
4. Only ITL is over its limit: steps are long, as they decode many sequences or carry chunks of prompts.
5. TTFT is over its limit, and requests waited in the queue for most of it: more comes in than is served. Where the
   server does not tell queue times, waiting requests say the same, if the prompts are short.
6. TTFT is over its limit: a long prompt takes that long to compute or is admitted late; for a short one, steps are
   slow.
"""

from dataclasses import dataclass

TTFT_LIMIT_S = 0.5   # where a run has no limits of its own: what a reader takes for an immediate answer,
ITL_LIMIT_S = 0.05   # and for a fluent one
_LONG_PROMPT = 1024  # tokens
_FULL = 0.95         # of the KV blocks
_HALF_FULL = 0.5


@dataclass(frozen=True, slots=True)
class Observation:
    """What the sentence is about: typical figures of requests, and what the server told, if it did."""

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


    @property
    def is_late(self) -> bool:
        """Whether the first token takes too long."""
        return self.ttft_s > self.ttft_limit_s

    @property
    def is_halting(self) -> bool:
        """Whether the tokens after it do."""
        return self.itl_s > self.itl_limit_s

    @property
    def is_out_of_blocks(self) -> bool:
        """Whether the KV cache was what requests fought for."""
        return self.num_preemptions > 0 or (self.peak_kv_usage or 0.0) >= _FULL

    @property
    def has_spare_blocks(self) -> bool:
        """Whether the server told that the KV cache was never half full."""
        return self.peak_kv_usage is not None and self.peak_kv_usage < _HALF_FULL

    @property
    def has_queued(self) -> bool:
        """Whether the wait for the first token was mostly a wait for a seat."""
        if self.queue_s is not None:
            return self.queue_s > self.ttft_s / 2
        return self.num_prompt_tokens < _LONG_PROMPT and (self.mean_waiting or 0.0) > 0


def diagnose(seen: Observation) -> str:
    """Return the sentence."""
    if seen.num_failed:
        return f"{seen.num_failed} requests failed: look at the errors before any figure."
    return f"{_advice(seen)}: {_figures(seen)}."


def _advice(seen: Observation) -> str:
    if not seen.is_late and not seen.is_halting:
        return "Answers are too long for the limit on the whole request" if seen.is_too_long else "Fine"
    if seen.is_out_of_blocks:
        return "KV cache full: look at the KV budget, or let fewer sequences run together"
    if not seen.is_late:
        kv_budget = "" if seen.has_spare_blocks else "the KV budget, and at "
        return f"Decode pressure: look at {kv_budget}how many sequences share a step"
    if seen.has_queued:
        return "Queueing: more comes in than is served; look at the rate, and at how many sequences may run together"
    if seen.num_prompt_tokens >= _LONG_PROMPT:
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
