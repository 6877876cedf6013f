"""The server's application over a stand-in for the engine, asked without a network or through real sockets."""

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import uvloop
from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp

from quire.engine.metrics.page import Metrics
from quire.server.app import create_app
from quire.server.http.http_server import HttpServer
from quire.server.http.sockets import bind, port_of
from quire.server.options import Limits, ServerOptions
from quire.server.service import Service
from quire.server.templates.template_renderer import TemplateRenderer

HOST = "127.0.0.1"
SOCKET_LIMIT_S = 120.0


class StandInEngine:
    """What the shell of the server looks at; no request reaches it."""

    def __init__(self) -> None:
        self.is_alive, self.death_reason = True, "the engine process ended"
        self.num_queued = self.num_free_seqs = self.num_queued_tokens = 0
        self.stalled_s = 0.0
        self.tokenizer = None
        self.ready = SimpleNamespace(limits=SimpleNamespace(max_num_seqs=2))
        self.inputs = SimpleNamespace(max_logprobs=20, images=None)
        self.engines = (self,)


def make_app(**options: Any) -> FastAPI:  # noqa: ANN401 (those of ServerOptions)
    """Return the server's application with one route more: /echo answers with the body that it got."""
    engine: Any = StandInEngine()
    app = create_app(Service(engine, ServerOptions(**options), ("tiny",), Metrics("tiny"), TemplateRenderer(None)))

    @app.post("/echo")
    async def echo(request: Request) -> Response:
        return Response(await request.body(), media_type="application/json")

    return app


def ask(app: ASGIApp, method: str, path: str, **settings: Any) -> httpx.Response:  # noqa: ANN401 (httpx's)
    """Ask an application without a network."""

    async def request() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.request(method, path, **settings)

    return asyncio.run(request())


@contextmanager
def serving(app: ASGIApp, *, tls: ssl.SSLContext | None = None, **limits: Any) -> Iterator[int]:  # noqa: ANN401 (those of Limits)
    """Serve an application on real sockets, from a thread; yield the port."""
    is_ready, is_over, loop = threading.Event(), asyncio.Event(), uvloop.new_event_loop()

    async def serve() -> None:
        server = HttpServer(app, Limits(**limits), tls)
        await server.start(listener, HOST)
        is_ready.set()
        await is_over.wait()
        await server.stop()

    with bind(HOST, 0) as listener:
        port = port_of(listener)
        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
        thread.start()
        try:
            assert is_ready.wait(SOCKET_LIMIT_S)
            yield port
        finally:
            loop.call_soon_threadsafe(is_over.set)
            thread.join(SOCKET_LIMIT_S)
            loop.close()


def connect(port: int, receive_buffer: int | None = None) -> socket.socket:
    """Return a connection on which nothing was said yet. `receive_buffer`: bytes that it may hold unread."""
    connection = socket.socket()
    connection.settimeout(SOCKET_LIMIT_S)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((HOST, port))
    return connection


def exchange(port: int, *pieces: bytes) -> bytes:
    """Send bytes on one connection; return everything that comes until the server closes it."""
    with connect(port) as connection:
        for piece in pieces:
            connection.sendall(piece)
        return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    """Read until the other side closes the connection."""
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    return received


def read_one(connection: socket.socket) -> bytes:
    """Read one response with a Content-Length, whole, however many segments it comes in."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


class RawResponse(NamedTuple):
    """One response as it came over a socket."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error that the body carries."""
        return json.loads(self.body)["error"]  # type: ignore[no-any-return]


def parse(response: bytes) -> RawResponse:
    """Take a single response with a plain body apart."""
    head, _, body = response.partition(b"\r\n\r\n")
    status_line, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert headers.get("content-length", str(len(body))) == str(len(body))
    return RawResponse(int(status_line.split()[1]), headers, body)
