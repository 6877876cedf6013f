"""HTTP server: bursts are accepted and started a few at once, and a listener pauses without file descriptors."""

import asyncio
import errno
import socket
from collections import Counter
from typing import cast

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from quire.server.http import http_server
from quire.server.http.http_server import HttpServer, Listener
from quire.server.http.protocol import MAX_PER_ITERATION
from quire.server.http.sockets import bind
from support.engine_process import until


class Scarce(socket.socket):
    """A listener of a process that has no more descriptors, for as long as it is told.

    The first try is followed by another one soon, later ones by none.
    """

    num_tries, is_scarce = 0, True

    def accept(self) -> tuple[socket.socket, object]:
        self.num_tries += 1
        if self.is_scarce:
            http_server.PAUSE_S = 0.01 if self.num_tries == 1 else 3600
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


class Greeter(asyncio.Protocol):
    """Says hello, and hangs up."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(b"hello")
        transport.close()


def test_door_without_descriptors_tries_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "PAUSE_S", http_server.PAUSE_S)     # restored: the listener sets it

    async def run() -> None:
        with Scarce() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            accepting = Listener(listener, Greeter)
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            await until(lambda: listener.num_tries == 2)  # it has been opened again, and is shut for an hour
            await asyncio.sleep(0.1)
            assert listener.num_tries == 2
            listener.is_scarce = False
            accepting._start_accepting()
            assert await reader.read() == b"hello"
            accepting.close()
            _, late = await asyncio.open_connection(*listener.getsockname())
            await asyncio.sleep(0.1)
            assert listener.num_tries == 4, "one connection is accepted, and none after the close"
            writer.close()
            late.close()

    uvloop.run(asyncio.wait_for(run(), 60))


def test_requests_of_a_burst_are_started_a_few_per_iteration() -> None:
    started, lost = list[int](), list[int]()
    iteration = 0

    async def count() -> None:
        nonlocal iteration
        while True:
            iteration += 1
            await asyncio.sleep(0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        started.append(iteration)
        while (await receive())["type"] != "http.disconnect":
            pass
        lost.append(iteration)

    async def run() -> None:
        with bind("127.0.0.1", 0) as listener:
            http = HttpServer(app)
            await http.start(listener, "127.0.0.1")
            counting = asyncio.create_task(count())
            clients = [socket.create_connection(listener.getsockname()) for _ in range(100)]
            for client in clients:
                client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await until(lambda: len(started) == 100)
            for client in clients:
                client.close()
            await until(lambda: len(lost) == 100)
            assert await http.wait_until_answered(60)
            counting.cancel()
            await http.stop()

    uvloop.run(asyncio.wait_for(run(), 60))
    assert max(Counter(started).values()) <= MAX_PER_ITERATION
    assert max(Counter(lost).values()) <= MAX_PER_ITERATION
