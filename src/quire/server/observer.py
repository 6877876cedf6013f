"""Observer of API requests: the events that the generation routes publish to the optional inspection.

A service has at most one observer. Without one nothing is recorded, and serving is the same.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quire.core.outputs import CompletionOutput, RequestMetrics
from quire.engine.requests.input_processor import TokenizedPrompt


class QueuedRequest(NamedTuple):
    """An engine request that has been queued for one prompt of an API request."""

    prompt: TokenizedPrompt
    metrics: RequestMetrics     # updated while the request runs
    reads_cache: bool           # False: all of the prompt is computed, for its logprobs


class ObservedRequest(Protocol):
    """Events of one API request after it was queued."""

    def on_output(self, prompt_index: int, piece: CompletionOutput) -> None:
        """Record the new tokens of one branch."""

    def on_finished(self) -> None:
        """Record the end of the request: finished, failed or aborted."""


class RequestObserver(Protocol):
    """Receives each API request once, when all of its prompts have been queued."""

    def on_queued(self, request_id: str, requests: Sequence[QueuedRequest]) -> ObservedRequest:
        """Return the observer of the request's further events."""
