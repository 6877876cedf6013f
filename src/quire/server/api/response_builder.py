"""Response builder: the interface between the outputs of the engine and the bytes of a dialect's responses."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from quire.core.outputs import RequestOutput
from quire.server.api.usage import TokenUsage
from quire.server.errors import ApiError


class ResponseBuilder(Protocol):
    """Builds the response to one API request: either `response`, or chunks of a stream, in slices of bounded work."""

    @property
    def streams(self) -> bool:
        """Whether the client asked for a stream."""

    def response(self, outputs: Sequence[RequestOutput], usage: TokenUsage) -> Iterator[bytes]:
        """Yield the whole response, from the last output of each prompt."""

    def first_chunk(self) -> bytes:
        """Return the beginning of a stream, sent before there is an output."""

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[bytes]:
        """Yield the events for the new part of an output; nothing if there is nothing to show."""

    def weight(self, prompt_index: int, output: RequestOutput) -> int:
        """Return the work of encoding an output, in units of `MAX_SLICE_UNITS`."""

    def last_chunk(self, usage: TokenUsage) -> bytes:
        """Return the end of a stream."""

    def error_chunk(self, error: ApiError) -> bytes:
        """Return the end of a stream that failed."""
