"""uvicorn in a loop and under signals that are ours."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from quire.server.http.lingering_close import LingeringConnections
from quire.server.http.protocol import Protocol
from quire.server.http.sockets import BACKLOG, listen
from quire.server.options import DEFAULT_LIMITS, Limits

CLOSE_LIMIT_S = 1       # for what was written to reach slow clients
PAUSE_S = 0.5           # in which nobody is let in, when the system has no more descriptors


class Listener:
    """Lets connections in. While the system has no descriptors it is shut: uvloop's own listener would try for ever."""

    def __init__(self, listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        self._listener, self._make_protocol = listener, make_protocol
        self._loop = asyncio.get_running_loop()
        self._connecting = set[asyncio.Task[None]]()
        self._start_handle = self._loop.call_soon(self._start_accepting)
        listener.setblocking(False)

    def close(self) -> None:
        """Let nobody in any more."""
        self._start_handle.cancel()
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Wait for nothing: it has been shut at once."""

    def _start_accepting(self) -> None:
        self._loop.add_reader(self._listener, self._accept_all)

    def _accept_all(self) -> None:
        """Take all who have come."""
        try:
            while True:
                connection, _ = self._listener.accept()
                connecting = self._loop.create_task(self._connect(connection))
                self._connecting.add(connecting)
                connecting.add_done_callback(self._connecting.discard)
        except (BlockingIOError, ConnectionAbortedError):
            pass
        except OSError:
            self.close()
            self._start_handle = self._loop.call_later(PAUSE_S, self._start_accepting)

    async def _connect(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it is gone already
            await self._loop.connect_accepted_socket(self._make_protocol, connection)


class HttpServer(uvicorn.Server):
    """Serves an application on a socket that is bound already."""

    def __init__(self, app: ASGIApp, limits: Limits = DEFAULT_LIMITS) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=limits.idle_timeout,  # type: ignore[arg-type]
                timeout_graceful_shutdown=CLOSE_LIMIT_S,
            )
        )
        self._limits = limits
        self._is_listening = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    @property
    def num_open_requests(self) -> int:
        """Requests that have not been answered in full."""
        return len(self.server_state.tasks)

    async def start(self, listener: socket.socket, host: str) -> None:
        """Begin to answer. ConfigError if the port has been taken since it was bound."""
        listen(listener, host)
        self._serving = asyncio.create_task(self.serve(sockets=[listener]))
        listening = asyncio.create_task(self._is_listening.wait())
        await asyncio.wait((self._serving, listening), return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            self._serving.result()  # it has failed

    async def wait_until_answered(self, timeout_s: float) -> bool:
        """Wait for all open requests, also those that come meanwhile; return whether that was within the time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.num_open_requests:
                    await asyncio.wait(self.server_state.tasks)
        return not self.num_open_requests

    async def stop(self) -> None:
        """Close the port and all connections, whether their clients are done or not."""
        self.should_exit = True
        assert self._serving is not None
        await self._serving

    # --- uvicorn's hooks ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open a accepting of our own to each socket, and tell that it is done."""
        make_protocol = partial(Protocol, self._limits, LingeringConnections(), self.config, self.server_state, {})
        self.servers = [Listener(each, make_protocol) for each in sockets or ()]  # type: ignore[misc]
        self.started = True
        self._is_listening.set()
