"""A proxy in front of a server, which keeps each request with its answer: the bodies that real clients send."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientSession, ClientTimeout, web

_PER_CONNECTION = frozenset(("host", "connection", "content-length", "transfer-encoding", "accept-encoding"))


@dataclass
class Exchange:
    """One request and its answer. `status` None: the client left before it had one."""

    method: str
    path: str
    body: Any                   # JSON, or None
    status: int | None = None
    text: str = ""              # text of the answer so far
    duration_s: float = 0.0
    is_over: bool = False

    def __str__(self) -> str:
        fields = sorted(self.body) if isinstance(self.body, dict) else self.body
        return f"{self.method} {self.path} {self.status}: {self.text[:1000]} to a body with {fields}"


@dataclass
class RecordingProxy:
    """Where it listens, the server behind it, and all exchanges in order of their requests."""

    url: str
    target: str
    exchanges: list[Exchange] = field(default_factory=list)

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Ask the server the same, and pass on the answer in the pieces in which it comes."""
        body, began_s = await request.read(), time.monotonic()
        exchange = Exchange(request.method, request.path, json.loads(body) if body else None)
        self.exchanges.append(exchange)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _PER_CONNECTION}
        target = f"{self.target}{request.rel_url}"
        try:
            async with (
                ClientSession(timeout=ClientTimeout(None)) as session,
                session.request(request.method, target, data=body, headers=headers) as answer,
            ):
                exchange.status = answer.status
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    exchange.text += piece.decode(errors="replace")
                    await response.write(piece)
                return response
        finally:
            exchange.duration_s, exchange.is_over = time.monotonic() - began_s, True


@contextmanager
def recording_proxy(target: str) -> Iterator[RecordingProxy]:
    """Listen on a free port of the loopback, from a thread of its own. A client that leaves ends its request."""
    loop = asyncio.new_event_loop()
    proxy = RecordingProxy("", target)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", proxy.forward)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
    proxy.url = "http://{}:{}".format(*runner.addresses[0][:2])
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(timeout=120)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=120)
        loop.close()
