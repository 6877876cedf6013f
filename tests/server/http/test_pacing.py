"""Read gate: a few connections are read per iteration of the event loop, whatever number is ready."""

import asyncio
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from quire.server.http.http_server import HttpServer
from quire.server.http.protocol import MAX_DIRECT, READS_PER_ITERATION, GatedFlow, ReadGate
from quire.server.http.sockets import bind
from support.engine_process import until

NUM_CLIENTS = MAX_DIRECT + 5 * READS_PER_ITERATION


class Reads:
    """The iterations of the event loop in which connections were read, or found closed."""

    def __init__(self) -> None:
        self.iteration = 0
        self.read, self.closed = list[int](), list[int]()
        self._count()

    def _count(self) -> None:
        self.iteration += 1
        asyncio.get_running_loop().call_soon(self._count)


class Reader(asyncio.Protocol):
    """One gated connection."""

    def __init__(self, gate: ReadGate, reads: Reads) -> None:
        self._gate, self._reads = gate, reads

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._flow = GatedFlow(cast(asyncio.Transport, transport), self._gate)

    def data_received(self, data: bytes) -> None:
        self._reads.read.append(self._reads.iteration)
        self._flow.finish_read()

    def eof_received(self) -> None:
        self._reads.closed.append(self._reads.iteration)

    def connection_lost(self, exc: Exception | None) -> None:
        self._flow.close()


async def connected(gate: ReadGate, reads: Reads) -> list[socket.socket]:
    """Return the clients of as many gated connections, which are all idle."""
    clients = list[socket.socket]()
    for _ in range(NUM_CLIENTS):
        client, server = socket.socketpair()
        await asyncio.get_running_loop().connect_accepted_socket(lambda: Reader(gate, reads), server)
        clients.append(client)
    await asyncio.sleep(0)
    return clients


@contextmanager
def closing(clients: list[socket.socket]) -> Iterator[None]:
    try:
        yield
    finally:
        for client in clients:
            client.close()


def assert_few_at_once(iterations: list[int], num_direct: int) -> None:
    """Assert that one iteration read the direct connections and a few, and every other one a few."""
    most = Counter(iterations).most_common(2)
    assert most[0][1] <= num_direct + READS_PER_ITERATION
    assert most[1][1] <= READS_PER_ITERATION


def test_requests_and_ends_of_many_connections_are_read_a_few_per_iteration() -> None:
    async def run() -> None:
        gate, reads = ReadGate(), Reads()
        clients = await connected(gate, reads)
        with closing(clients):
            for number in (1, 2):
                for client in clients:
                    client.sendall(b"x")
                await until(lambda number=number: len(reads.read) == number * NUM_CLIENTS)
                assert_few_at_once(reads.read[-NUM_CLIENTS:], MAX_DIRECT)
        await until(lambda: len(reads.closed) == NUM_CLIENTS)
        assert_few_at_once(reads.closed, MAX_DIRECT)
        gate.close()

    uvloop.run(asyncio.wait_for(run(), 60))


def test_places_of_closed_connections_are_taken_by_those_that_are_read_next() -> None:
    async def run() -> None:
        gate, reads = ReadGate(), Reads()
        clients = await connected(gate, reads)
        assert not gate.enter()
        with closing(clients):
            for client in clients[:MAX_DIRECT]:
                client.close()
            await until(lambda: len(reads.closed) == MAX_DIRECT)
            await asyncio.sleep(0)
            for number, client in enumerate(clients[MAX_DIRECT : 2 * MAX_DIRECT]):
                client.sendall(b"x")
                await until(lambda number=number: len(reads.read) == number + 1)
            assert not gate.enter(), "each connection that was read has a place"
        await until(lambda: len(reads.closed) == NUM_CLIENTS)
        await asyncio.sleep(0)
        assert all(gate.enter() for _ in range(MAX_DIRECT)), "all places are free"
        gate.close()

    uvloop.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize(
    ("length", "num_pipelined"), [(1, (1, 1, 3)), (1 << 20, (1, 1))], ids=["short", "long: uvicorn pauses reading"]
)
def test_gated_connection_is_answered_request_for_request(length: int, num_pipelined: tuple[int, ...]) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes, has_more = 0, True
        while has_more:
            event = await receive()
            num_bytes, has_more = num_bytes + len(event.get("body", b"")), event.get("more_body", False)
        headers = [(b"content-length", b"7")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"%07d" % num_bytes})

    async def run() -> None:
        with bind("127.0.0.1", 0) as listener:
            http = HttpServer(app)
            await http.start(listener, "127.0.0.1")
            host, port = listener.getsockname()
            idle = [socket.create_connection((host, port)) for _ in range(MAX_DIRECT)]
            with closing(idle):
                await until(lambda: len(http.server_state.connections) == MAX_DIRECT)
                reader, writer = await asyncio.open_connection(host, port)
                request = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % length + b"x" * length
                for count in num_pipelined:
                    writer.write(request * count)
                    for _ in range(count):
                        await reader.readuntil(b"\r\n\r\n")
                        assert await reader.readexactly(7) == b"%07d" % length
                writer.close()
            await until(lambda: not http.server_state.connections)
            await http.stop()

    uvloop.run(asyncio.wait_for(run(), 60))
