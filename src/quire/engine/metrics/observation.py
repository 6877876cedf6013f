"""Observers of engines, and of the calls to a server that has them.

Those here count only what the Retry-After of refused calls needs. The metrics (`quire.engine.metrics`) are observers
that count everything.
"""

import math
import time
from collections import deque
from collections.abc import Sequence

from quire.engine.messages import EngineState, Ready, Stepped
from quire.engine.requests.output_processor import FinishedRequest, ProcessedStep

RETRY_AFTER_S = 5  # where no estimate is known
WINDOW_S = 30      # older admissions do not count
LONGEST_S = 60     # upper bound: the estimate is rough


class AdmissionRate:
    """Admissions of the last WINDOW_S seconds, in one count per second."""

    def __init__(self) -> None:
        self._busy: set[int] = set()                 # engines that have admitted requests since they were last idle
        self._busy_since_s = 0.0
        self._by_second: deque[tuple[int, int]] = deque(maxlen=WINDOW_S)

    def record(self, num_requests: int, now_s: float, engine: int = 0) -> None:
        """Count requests that left the queue of an engine."""
        if not num_requests:
            return
        if not self._busy:
            self._busy_since_s = now_s
        self._busy.add(engine)
        second = int(now_s)
        if self._by_second and self._by_second[-1][0] == second:
            num_requests += self._by_second.pop()[1]
        self._by_second.append((second, num_requests))

    def rest(self, engine: int = 0) -> None:
        """Record that an engine is idle; once all are, start anew: a rate without requests says nothing."""
        self._busy.discard(engine)
        if not self._busy:
            self._by_second.clear()

    def seconds_to_admit(self, num_requests: int, now_s: float) -> int:
        """Return the whole seconds, 1 to LONGEST_S, until so many requests will have left at the current rate."""
        if not self._busy:
            return RETRY_AFTER_S
        num_recent = sum(num for second, num in self._by_second if second > now_s - WINDOW_S)
        if not num_recent:
            return LONGEST_S
        window_s = min(max(now_s - self._busy_since_s, 1.0), WINDOW_S)
        return min(max(math.ceil(num_requests * window_s / num_recent), 1), LONGEST_S)


class EngineObserver:
    """An `Observer` of an engine's client that feeds the rate of admissions. Lives on the event loop."""

    def __init__(self, admissions: AdmissionRate, number: int = 0) -> None:
        self.num_queued = 0     # requests sent to the engine that have not run yet, for `Observation.exposition`
        self._admissions, self._number = admissions, number

    def on_step(self, step: Stepped, processed: ProcessedStep) -> None:
        """Record a step of the engine and what it gave to requests."""
        if step.admissions:
            num_admitted = sum([not admission.num_preemptions for admission in step.admissions])
            self._admissions.record(num_admitted, step.started_s, self._number)

    def on_idle(self, state: EngineState) -> None:
        """Record that no request waits or runs."""
        self._admissions.rest(self._number)

    def on_abort(self, ended: FinishedRequest) -> None:
        """Record a request that its client, or the server, has aborted."""

    def engine_ready(self, ready: Ready) -> None:
        """Record what the engine has loaded."""

    def engine_restarted(self) -> None:
        """Record an engine that replaced a dead one."""

    def engine_died(self) -> None:
        """Record the death of the engine. Idempotent."""
        self._admissions.rest(self._number)


class Observation:
    """The observers of all engines by number, and the counts of calls. Lives on the event loop."""

    engines: Sequence[EngineObserver]

    def __init__(self, num_engines: int = 1) -> None:
        self._admissions = AdmissionRate()
        self.engines = [EngineObserver(self._admissions, number) for number in range(num_engines)]

    def refused(self, reason: str) -> None:
        """Record a call that was not admitted, for the code of its error."""

    def queue_full(self, bound: str) -> None:
        """Record a call that was not admitted because a bound of the queue was reached, by vLLM's name."""

    def failed(self, reason: str) -> None:
        """Record a call that failed through no fault of its own, for the code of its error."""

    def retry_after_s(self, num_queued: int) -> int:
        """Return the seconds after which a refused client may retry, from the rate at which requests leave the queue.

        By then all requests that wait now will have left the queue: earlier, all refused clients would compete for one
        place.
        """
        return self._admissions.seconds_to_admit(num_queued, time.monotonic())

    def exposition(self, num_queued: Sequence[int] = ()) -> tuple[bytes, str] | None:
        """Return the page of metrics and its content type; None: there are none.

        `num_queued`: by engine, requests sent to it that have not run yet.
        """
        return None
