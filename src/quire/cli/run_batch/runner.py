"""Run of a batch: each line is a call of the server's application in this process, without a socket.

So the fields, bounds and errors are those of the routes. Lines are asked as room comes free, and answered in order.
"""

import asyncio
import json
import socket
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TextIO

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Scope

from quire.cli.run_batch.lines import BatchLineReader, Line, answered, refused
from quire.engine.launcher import EngineProcess, spawn_engines
from quire.engine.messages import EngineDeadError
from quire.engine.options import EngineOptions
from quire.engine.processes.base_client import SupervisedClient
from quire.server.apis import system
from quire.server.app import create_app
from quire.server.http.http_server import HttpServer
from quire.server.lifecycle import close_service, connect
from quire.server.options import ServerOptions
from quire.server.service import Service


class MetricsServer:
    """An application whose / and /metrics are the metrics of a service, an empty page until there is one."""

    def __init__(self) -> None:
        self.app = Starlette(routes=[Route(path, self._answer) for path in ("/", "/metrics")])
        self.app.state.service = None

    def show(self, service: Service) -> None:
        """Answer with the metrics of a service from now on."""
        self.app.state.service = service

    async def _answer(self, request: Request) -> Response:
        return Response() if self.app.state.service is None else await system.metrics(request)


@asynccontextmanager
async def serving_metrics(listener: socket.socket | None, host: str) -> AsyncIterator[MetricsServer]:
    """Serve metrics on a bound socket, if there is one. ConfigError if another process listens there by now."""
    server = MetricsServer()
    if listener is None:
        yield server
        return
    http = HttpServer(server.app)
    await http.start(listener, host)
    try:
        yield server
    finally:
        await http.stop()


_RETRY_S = 0.5
_TOO_MANY = 429


@dataclass(slots=True)
class Totals:
    """Lines that were written, those of them with an error, and malformed ones, which name no request."""

    num_lines: int = 0
    num_failed: int = 0
    num_malformed: int = 0


async def run(
    engine: EngineOptions, options: ServerOptions, lines: Iterator[Line], output: TextIO, max_inflight: int,
    metrics_listener: socket.socket | None = None,
) -> Totals:  # fmt: skip
    """Start an engine, ask all lines, write the answers. Raises as the start of a server, or EngineDeadError.

    An engine without progress is ended. Of several engines those that die are started again.

    metrics_listener: a bound socket, where the metrics of the run are served from its start to its end.
    """
    children = spawn_engines(engine)
    try:
        async with serving_metrics(metrics_listener, options.host) as metrics:
            service = await connect(children, engine, options, ends_stalled=True)
            supervising = asyncio.create_task(_supervise(service, children), name="engine supervisor")
            try:
                metrics.show(service)
                return await _ask_all(create_app(service), service, lines, output, max_inflight)
            finally:
                supervising.cancel()
                await asyncio.wait([supervising])   # it may have to stop an engine that loads
                await close_service(service)
                service.threads.close()
    finally:
        for child in children:
            child.stop()


async def _supervise(service: Service, children: list[EngineProcess]) -> None:
    """Start engines again that die, where there are several."""
    if isinstance(service.client, SupervisedClient):
        await service.client.supervise(children.__setitem__)


async def _ask_all(
    app: FastAPI, service: Service, lines: Iterator[Line], output: TextIO, max_inflight: int
) -> Totals:
    """Ask up to `max_inflight` lines at a time; write answers in the order of the lines."""
    totals, asked = Totals(), deque[asyncio.Task[dict[str, Any]]]()
    reader = BatchLineReader(lines)
    reading: asyncio.Task[Line | None] | None = asyncio.create_task(reader.next())

    async def write_first() -> None:
        answer = await asked.popleft()
        if not service.client.is_alive:
            raise EngineDeadError(service.client.death_reason)
        output.write(json.dumps(answer) + "\n")
        output.flush()
        totals.num_lines += 1
        totals.num_failed += answer["error"] is not None
        totals.num_malformed += answer["custom_id"] is None

    try:
        while reading is not None or asked:
            awaited: list[asyncio.Task[Any]] = list(islice(asked, 1))
            if reading is not None and len(asked) < max_inflight:
                awaited.append(reading)
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if asked and asked[0].done():
                await write_first()
            elif reading is not None:
                line = reading.result()
                reading = None
                if line is not None:
                    asked.append(asyncio.create_task(_ask(app, line, asked)))
                    reading = asyncio.create_task(reader.next())
    finally:
        for task in (*asked, *filter(None, [reading])):
            task.cancel()
    return totals


async def _ask(app: FastAPI, line: Line, asked: deque[asyncio.Task[dict[str, Any]]]) -> dict[str, Any]:
    """Return the output of a line. One that finds a bound of the server reached is asked again when others are done."""
    if line.error is not None:
        return refused(line)
    while True:
        status, headers, body = await _call(app, line)
        if status != _TOO_MANY or asked[0] is asyncio.current_task():  # for the first, nothing more comes free
            return answered(line, status, headers.get(b"x-request-id", b"").decode(), body)
        await asyncio.sleep(_RETRY_S)


async def _call(app: FastAPI, line: Line) -> tuple[int, dict[bytes, bytes], bytes]:
    """Return status, headers and body of the application's response."""
    sent: list[Message] = [{"type": "http.request", "body": line.body, "more_body": False}]
    received: list[Message] = []
    path = line.url.encode()
    scope: Scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": line.url, "raw_path": path, "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json")], "client": None, "server": None,
    }  # fmt: skip

    async def receive() -> Message:
        if sent:
            return sent.pop()
        await asyncio.Event().wait()  # no client goes away
        raise AssertionError("never set")

    async def send(message: Message) -> None:
        received.append(message)

    await app(scope, receive, send)
    start, *parts = received
    return start["status"], dict(start["headers"]), b"".join(part.get("body", b"") for part in parts)
