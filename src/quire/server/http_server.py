"""uvicorn in a loop and under signals that are ours."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from quire.server.listener import BACKLOG, listen
from quire.server.options import DEFAULT_LIMITS, Limits
from quire.server.protocol import Protocol

CLOSE_LIMIT_S = 1       # for what was written to reach slow clients


class HttpServer(uvicorn.Server):
    """Serves an application on a socket that is bound already."""

    def __init__(self, app: ASGIApp, limits: Limits = DEFAULT_LIMITS) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(Protocol, limits),  # type: ignore[arg-type]
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
        self._is_listening = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
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
                while self.num_open:
                    await asyncio.wait(self.server_state.tasks)
        return not self.num_open

    async def end(self) -> None:
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
        """Tell that it is done."""
        await super().startup(sockets)
        self._is_listening.set()
