"""Counts of requests within their targets of time, by target: those of the engine, and deadlines of their own.

TTFT and ITL have the targets of the engine (`--ttft-target-ms`, `--itl-target-ms`). A request meets the one for ITL if
at most one in a hundred of the gaps between its tokens, over all of its choices, is longer: the 99th percentile of its
gaps. A mean would hide the one gap of seconds that the target is there to prevent. Aborted requests do not count: when
they ended was not the engine's doing.
"""

import math
from typing import Literal, get_args

from quire.engine.requests.output_processor import FinishedRequest

Target = Literal["ttft", "itl", "deadline", "all"]  # all: every target that the request has
LATE_GAPS_SHARE = 0.01


class TargetCounts:
    """Requests that had a target, and those that met it. Targets in seconds; infinity: there is none."""

    def __init__(self, ttft_s: float, itl_s: float) -> None:
        self._ttft_s, self._itl_s = ttft_s, itl_s
        self.num_with = dict.fromkeys(get_args(Target), 0)
        self.num_on = dict.fromkeys(get_args(Target), 0)

    def count(self, ended: FinishedRequest) -> None:
        """Count a request that has ended by itself."""
        met = dict[str, bool]()
        if self._ttft_s < math.inf:
            first_token_s = ended.metrics.first_token_s
            met["ttft"] = first_token_s is not None and first_token_s - ended.metrics.arrival_s <= self._ttft_s
        if self._itl_s < math.inf:
            met["itl"] = ended.num_late_gaps <= LATE_GAPS_SHARE * ended.num_gaps
        if ended.met_deadline is not None:
            met["deadline"] = ended.met_deadline
        self._add(met)

    def count_unbegun(self, num_requests: int) -> None:
        """Count requests whose deadline has passed before their first token."""
        for target in ("deadline", "all"):
            self.num_with[target] += num_requests

    def _add(self, met: dict[str, bool]) -> None:
        if not met:
            return
        for target, is_met in (met | {"all": all(met.values())}).items():
            self.num_with[target] += 1
            self.num_on[target] += is_met
