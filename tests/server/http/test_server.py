"""Listener: it accepts all waiting connections, and pauses while the system has no file descriptors."""

import asyncio
import errno
import socket
from typing import cast

import pytest
import uvloop

from quire.server.http import server as http_server
from quire.server.http.server import Listener
from support.engine_process import until


class Scarce(socket.socket):
    """A listener of a process that has no more descriptors, for as long as it is told."""

    num_tries, is_scarce = 0, True

    def accept(self) -> tuple[socket.socket, object]:
        self.num_tries += 1
        if self.is_scarce:
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


class Greeter(asyncio.Protocol):
    """Says hello, and hangs up."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(b"hello")
        transport.close()


def test_door_without_descriptors_tries_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "PAUSE_S", 0.05)

    async def run() -> None:
        with Scarce() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            accepting = Listener(listener, Greeter)
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            await until(lambda: listener.num_tries == 1)
            monkeypatch.setattr(http_server, "PAUSE_S", 3600)
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
