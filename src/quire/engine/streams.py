"""What the server reads of one request that an engine runs."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from quire.core.errors import EngineError
from quire.core.outputs import RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from quire.engine.client import EngineClient


class RequestStream(AsyncIterator[RequestOutput]):
    """The outputs of one request, as its kind says. Whoever stops before the end calls `abort`."""

    def __init__(self, client: "EngineClient", request_id: int, metrics: RequestMetrics) -> None:
        self.metrics = metrics                            # kept up to date while the request lives
        self._client, self._request_id = client, request_id
        self._changed = asyncio.Event()                   # since the reader has looked
        self._has_output = self._is_over = False
        self._error: EngineError | None = None            # comes after the output that is there

    async def __anext__(self) -> RequestOutput:
        """Wait for the next output. EngineDeadError or RequestFailedError if none can come any more."""
        if not (self._has_output or self._is_over or self._error):
            self._changed.clear()
            await self._changed.wait()
        if self._is_over:
            raise StopAsyncIteration
        if self._has_output:
            self._has_output = False
            output = self._client._output(self._request_id)
            self._is_over = output.finished
            return output
        assert self._error is not None, "woken for nothing"
        self._is_over = True
        self._client._forget(self._request_id)
        raise self._error

    def abort(self) -> None:
        """End the request if it runs, and forget it; who waits for it is told that it is over. Twice is fine."""
        self._is_over = True
        self._changed.set()
        self._client._abort(self._request_id)

    def wake(self) -> None:
        """Tell the reader that there is something new."""
        self._has_output = True
        self._changed.set()

    def fail(self, error: EngineError) -> None:
        """Tell the reader that nothing more comes, behind the output that is there. The first reason stands."""
        self._error = self._error or error
        self._has_output &= self._request_id in self._client._outputs
        self._changed.set()
