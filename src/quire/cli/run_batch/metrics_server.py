"""Metrics of a batch under way, for Prometheus, on a port of their own; no other route is there."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.server.apis import system
from quire.server.http.server import HttpServer
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
