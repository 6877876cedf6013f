"""HTTP server: uvicorn with our own listener, event loop and signal handling."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from quire.server.http.protocol import PacedCalls, Protocol, ReadGate
from quire.server.http.sockets import BACKLOG, LingeringConnections, listen
from quire.server.options import DEFAULT_LIMITS, Limits

log = logging.getLogger(__name__)

CLOSE_LIMIT_S = 1       # for written bytes to reach slow clients
ACCEPTED_AT_ONCE = 8    # connections per iteration of the event loop; their first requests are parsed in the next one
PAUSE_S = 0.5           # without accepting connections, when the system has no file descriptors left


class Listener:
    """Accepts connections. Pauses while the system has no file descriptors: uvloop's own listener would busy-loop.

    With TLS, at most `max_connections` connections may be in their handshake; more are closed.
    """

    def __init__(
        self, listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol],
        limits: Limits = DEFAULT_LIMITS, tls: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        self._listener, self._make_protocol = listener, make_protocol
        self._limits, self._tls = limits, tls
        self._loop = asyncio.get_running_loop()
        self._connecting = set[asyncio.Task[None]]()
        self._start_handle = self._loop.call_soon(self._start_accepting)
        listener.setblocking(False)

    def close(self) -> None:
        """Stop accepting connections."""
        self._start_handle.cancel()
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Return at once: `close` is synchronous."""

    def _start_accepting(self) -> None:
        self._loop.add_reader(self._listener, self._accept_some)

    def _accept_some(self) -> None:
        """Accept some of the waiting connections; the loop calls again while others wait."""
        try:
            for _ in range(ACCEPTED_AT_ONCE):
                connection, _ = self._listener.accept()
                if self._tls is not None and len(self._connecting) >= self._limits.max_connections:
                    connection.close()
                    continue
                connecting = self._loop.create_task(self._connect(connection))
                self._connecting.add(connecting)
                connecting.add_done_callback(self._connecting.discard)
        except (BlockingIOError, ConnectionAbortedError):
            pass  # all are accepted, or a client left the queue
        except OSError as error:
            log.warning("cannot accept connections: %s; next try in %g s", error, PAUSE_S)
            self.close()
            self._start_handle = self._loop.call_later(PAUSE_S, self._start_accepting)

    async def _connect(self, connection: socket.socket) -> None:
        limit_s = None if self._tls is None else self._limits.receive_timeout
        with contextlib.suppress(OSError):  # the client disconnected already, or its handshake failed
            await self._loop.connect_accepted_socket(
                self._make_protocol, connection, ssl=self._tls, ssl_handshake_timeout=limit_s
            )


class HttpServer(uvicorn.Server):
    """Serves an application on a bound socket."""

    def __init__(self, app: ASGIApp, limits: Limits = DEFAULT_LIMITS, tls: ssl.SSLContext | None = None) -> None:
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
        self._limits, self._tls = limits, tls
        self._is_listening = asyncio.Event()
        self._paced: PacedCalls | None = None  # from the start on, as the gate
        self._gate: ReadGate | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def num_open_requests(self) -> int:
        """Requests without a complete response, those that are not started yet included."""
        return len(self.server_state.tasks) + (0 if self._paced is None else len(self._paced))

    async def start(self, listener: socket.socket, host: str) -> None:
        """Start serving. ConfigError if another process listens on the port by now."""
        listen(listener, host)
        self._serving = asyncio.create_task(self.serve(sockets=[listener]))
        listening = asyncio.create_task(self._is_listening.wait())
        await asyncio.wait((self._serving, listening), return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            self._serving.result()  # raises its error

    async def wait_until_answered(self, timeout_s: float) -> bool:
        """Wait for all open requests, later ones included; return whether they finished within the time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.num_open_requests:
                    tasks = self.server_state.tasks
                    await (asyncio.wait(tasks) if tasks else asyncio.sleep(0))
        return not self.num_open_requests

    async def stop(self) -> None:
        """Close the port and all connections, with or without a complete response."""
        self.should_exit = True
        assert self._serving is not None
        await self._serving
        if self._gate is not None:
            self._gate.close()

    # --- uvicorn's hooks ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Create a Listener for each socket, and set the event for `start`."""
        self._paced, self._gate = PacedCalls(), ReadGate()
        make_protocol = partial(
            Protocol, self._limits, LingeringConnections(), self._paced, self._gate, self.config, self.server_state, {}
        )
        self.servers = [
            Listener(each, make_protocol, self._limits, self._tls) for each in sockets or ()  # type: ignore[misc]
        ]
        self.started = True
        self._is_listening.set()
