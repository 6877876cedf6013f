"""The answers that are being made, so that each can be ended from outside: its client has gone, or the server ends."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from starlette.types import Receive

from quire.server.errors import ApiError

T = TypeVar("T")


class ClientDisconnectedError(Exception):
    """The client has closed its connection; nobody waits for the answer any more."""


class ActiveResponses:
    """Every answer in the making. Lives on the event loop."""

    def __init__(self) -> None:
        self._ends: set[asyncio.Future[Exception]] = set()

    def __len__(self) -> int:
        """Count the answers in the making."""
        return len(self._ends)

    def cancel_all(self, error: ApiError) -> None:
        """End every answer with an error: a status where nothing was sent yet, else the last frame of the stream."""
        for end in self._ends:
            if not end.done():
                end.set_result(error)

    async def run(self, work: Coroutine[None, None, T], receive: Receive) -> T:
        """Return what `work` returns. Cancel it when its client goes, with ClientDisconnectedError, or at `cancel_all`.

        `receive` is that of the request, whose body has been read.
        """
        end: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._ends.add(end)
        working, watching = asyncio.create_task(work), asyncio.create_task(_client_gone(receive))
        try:
            await asyncio.wait((working, watching, end), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise end.result() if end.done() else ClientDisconnectedError
        finally:
            self._ends.discard(end)
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)


async def _client_gone(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
