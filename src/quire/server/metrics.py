"""Counters, gauges and histograms in Prometheus' format."""

from quire.core.outputs import KVStats
from quire.engine.output_processor import EndedRequest, ProcessedStep
from quire.engine.wire import EngineState, Stepped


class Metrics:
    """Everything that /metrics tells. An `Observer` of the engine's client; lives on the event loop."""

    def __init__(self, model_name: str, kv: KVStats | None = None) -> None:
        self.model_name = model_name

    def stepped(self, step: Stepped, processed: ProcessedStep) -> None:
        """Take down a step of the engine and what it meant to requests."""

    def idled(self, state: EngineState) -> None:
        """Take down that nothing waits and nothing runs."""

    def aborted(self, ended: EndedRequest) -> None:
        """Take down a request that its client, or the server, has ended."""

    def refused(self, reason: str) -> None:
        """Count a request that was not let in."""

    def seconds_until_room(self, num_queued: int) -> int:
        """Return when a refused client may try again, from the rate at which requests left the queue lately."""
        return 1

    def exposition(self, num_queued: int) -> tuple[bytes, str]:
        """Return the page and its content type. `num_queued`: requests that were sent and have not run yet."""
        raise NotImplementedError
