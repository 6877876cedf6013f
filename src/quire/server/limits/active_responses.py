"""Active responses, each cancelled when its client disconnects or the server stops."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from starlette.types import Receive

from quire.server.errors import ApiError

T = TypeVar("T")


class ClientDisconnectedError(Exception):
    """The client closed its connection before the end of the response."""


class ActiveResponses:
    """The responses that are being computed. Lives on the event loop."""

    def __init__(self) -> None:
        self._cancellations: set[asyncio.Future[Exception]] = set()

    def __len__(self) -> int:
        """Count the active responses."""
        return len(self._cancellations)

    def cancel_all(self, error: ApiError) -> None:
        """Cancel every response with an error: its status, or the last event of a stream that has started."""
        for end in self._cancellations:
            if not end.done():
                end.set_result(error)

    async def run(self, work: Coroutine[None, None, T], receive: Receive) -> T:
        """Return what `work` returns. Cancel it at `cancel_all`, or with ClientDisconnectedError at a disconnect.

        `receive` is that of the request, after its body was read.
        """
        end: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._cancellations.add(end)
        working, watching = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((working, watching, end), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise end.result() if end.done() else ClientDisconnectedError
        finally:
            self._cancellations.discard(end)
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
