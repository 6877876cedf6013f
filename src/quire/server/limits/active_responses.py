"""Active responses, each cancelled when its client disconnects or the server stops."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope

from quire.server.errors import ApiError

T = TypeVar("T")

DISCONNECT = "quire.disconnect"  # key of a scope: the Disconnect of a request, where the protocol knows of one


class ClientDisconnectedError(Exception):
    """The client closed its connection before the end of the response."""


class Disconnect(msgspec.Struct, eq=False):
    """Notice of the end of a client's connection, for the response that is being computed."""

    has_happened: bool = False
    response: "ActiveResponse | None" = None

    def notify(self) -> None:
        """Cancel the response: its client has disconnected."""
        self.has_happened = True
        if self.response is not None:
            self.response.cancel(ClientDisconnectedError())


class ActiveResponse:
    """One response, computed by the task that creates it."""

    __slots__ = ("_task", "error", "is_cancelled")

    def __init__(self) -> None:
        self._task = asyncio.current_task()     # None: the response has ended
        self.error: Exception | None = None     # the reason to cancel it
        self.is_cancelled = False

    def cancel(self, error: Exception) -> None:
        """Cancel the response, unless its result is there. Only the first error counts."""
        if self.error is None:
            self.error = error
            asyncio.get_running_loop().call_soon(self._cancel_task)

    def end(self) -> None:
        """End the response: its task goes on with other work."""
        if self._task is not None and self.is_cancelled:
            self._task.uncancel()
        self._task = None

    def _cancel_task(self) -> None:
        if self._task is not None:
            self.is_cancelled = True
            self._task.cancel()


class ActiveResponses:
    """The responses that are being computed. Lives on the event loop."""

    def __init__(self) -> None:
        self._active: set[ActiveResponse] = set()

    def __len__(self) -> int:
        """Count the active responses."""
        return len(self._active)

    def cancel_all(self, error: ApiError) -> None:
        """Cancel every response with an error: its status, or the last event of a stream that has started."""
        for response in self._active:
            response.cancel(error)

    async def run(self, work: Coroutine[None, None, T], scope: Scope, receive: Receive) -> T:
        """Return what `work` returns. Cancel it at `cancel_all`, or with ClientDisconnectedError at a disconnect.

        `receive` is that of the request, after its body was read: it tells of the disconnect where the scope does not.
        """
        disconnect: Disconnect | None = scope.get(DISCONNECT)
        if disconnect is not None and disconnect.has_happened:
            work.close()
            raise ClientDisconnectedError
        response, watching = ActiveResponse(), None
        if disconnect is None:
            watching = asyncio.create_task(_watch(receive, response))
        else:
            disconnect.response = response
        self._active.add(response)
        try:
            return await work
        except asyncio.CancelledError:
            if response.error is None or not response.is_cancelled:
                raise
            raise response.error from None
        finally:
            response.end()
            self._active.discard(response)
            if disconnect is not None:
                disconnect.response = None
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)


async def _watch(receive: Receive, response: ActiveResponse) -> None:
    """Cancel a response once the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
    response.cancel(ClientDisconnectedError())
