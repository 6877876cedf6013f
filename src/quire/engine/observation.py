"""Observers of engines, and of the calls to a server that has them.

Those here count only what the Retry-After of refused calls needs. The metrics (`quire.engine.metrics`) are observers
that count everything.
"""

import time
from collections.abc import Sequence

from quire.engine.admission_rate import AdmissionRate
from quire.engine.messages import EngineState, Ready, Stepped
from quire.engine.output_processor import FinishedRequest, ProcessedStep


class EngineObserver:
    """An `Observer` of an engine's client that feeds the rate of admissions. Lives on the event loop."""

    def __init__(self, admissions: AdmissionRate, number: int = 0) -> None:
        self.num_queued = 0     # requests sent to the engine that have not run yet, for `Observation.exposition`
        self._admissions, self._number = admissions, number

    def on_step(self, step: Stepped, processed: ProcessedStep) -> None:
        """Record a step of the engine and what it gave to requests."""
        num_admitted = sum(not admission.num_preemptions for admission in step.admissions)
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
