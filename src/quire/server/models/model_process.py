"""Process of one model of several: a server as `quire serve` starts it, on a Unix domain socket in a folder of its own.

It ends when its supervisor closes the socket pair between them, or dies; signals to the whole group do not reach it, so
that requests are answered while the supervisor drains. What it prints goes through the pair: the line of a server that
is ready, or the error of one that cannot start.
"""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import aiohttp
import msgspec

from quire.core.errors import EngineError
from quire.core.frames import frame, read_frame
from quire.engine import launcher
from quire.engine.options import EngineOptions
from quire.server.models.model_folder import LATEST
from quire.server.options import ServerOptions
from quire.server.start import start

READY = "Quire is serving "
ERROR = "error: "
KILL_AFTER_S = 10.0     # from the end of the pair; an idle server takes milliseconds


class ModelStart(msgspec.Struct, array_like=True, frozen=True):
    """The first message to the process."""

    engine: EngineOptions
    server: ServerOptions


class ModelProcess:
    """A running process, as its supervisor sees it. Lives on the event loop."""

    def __init__(self, name: str, path: Path, engine: EngineOptions, server: ServerOptions) -> None:
        """Start the process, which begins to load. OSError if it cannot be started."""
        self._folder = Path(tempfile.mkdtemp(prefix="quire-"))  # only this user may enter it
        uds = str(self._folder / "server")
        own = replace(
            server, models_dir=None, served_model_name=(name, name + LATEST), uds=uds, root_path="", allowed_origins=(),
            allow_credentials=False, ssl_certfile=None, ssl_keyfile=None, ssl_ca_certs=None, ssl_cert_reqs=0,
            ssl_ciphers=None,
        )  # fmt: skip
        self.process: subprocess.Popen[bytes]
        self.process, self._pair = launcher.start_module(
            "quire.server.models.model_process", env=launcher.spinning_environment()
        )
        with suppress(ConnectionError):     # it has died, which `run` finds
            self._pair.sendall(frame(ModelStart(replace(engine, model=str(path)), own)))
        self.session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(uds, limit=0), auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None), skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
        )  # fmt: skip
        self.has_ended = asyncio.Event()    # set by the supervisor, which lends it no more
        self._num_lent = 0
        self._is_free = asyncio.Event()
        self._is_free.set()

    async def run(self, on_ready: Callable[[], None]) -> str:
        """Wait until the process has ended, and call back when it answers; return the reason of the end."""
        reader, writer = await asyncio.open_connection(sock=self._pair)
        reason = ""
        try:
            while read := await reader.readline():
                line = read.decode(errors="replace").rstrip()
                if line.startswith(READY):
                    on_ready()
                elif line.startswith(ERROR):
                    reason = line.removeprefix(ERROR)
        except (OSError, ValueError):
            pass  # it was killed, or writes a line without end: its status tells
        finally:
            writer.close()
            status = await asyncio.to_thread(self._wait)
            shutil.rmtree(self._folder, ignore_errors=True)
        return reason or (f"it ended by signal {-status}" if status < 0 else f"it ended with status {status}")

    def lend(self) -> None:
        """Count a request that uses the session."""
        self._num_lent += 1
        self._is_free.clear()

    def take_back(self) -> None:
        """Count the end of such a request."""
        self._num_lent -= 1
        if not self._num_lent:
            self._is_free.set()

    async def close(self) -> None:
        """Close the session of an ended process once its requests have noticed: aiohttp would not tell them."""
        await self._is_free.wait()
        await self.session.close()

    def stop(self) -> None:
        """Ask the process to end; `run` returns when it has."""
        with suppress(OSError):
            self._pair.shutdown(socket.SHUT_WR)

    def _wait(self) -> int:
        """Wait for the end; kill what does not end in time."""
        try:
            return self.process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def main() -> None:
    """Serve the model of the first message until the pair ends."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    stream = connection.makefile("rb")
    message = read_frame(stream)
    if message is None:
        return
    begun = msgspec.msgpack.decode(message, type=ModelStart)
    threading.Thread(target=_end_with, args=(stream, begun.server.uds), daemon=True).start()
    sys.stdout = connection.makefile("w", encoding="utf-8", errors="replace")
    try:
        start(begun.engine, begun.server)
    except (EngineError, OSError) as error:
        with suppress(OSError):
            print(f"{ERROR}{' '.join(str(error).split())}", flush=True)  # noqa: T201
        sys.exit(1)


def _end_with(stream: BinaryIO, uds: str | None) -> None:
    """Wait for the end of the pair, then remove the socket's folder and end this process as a service manager does."""
    with suppress(OSError):
        stream.read()
    if uds is not None:
        shutil.rmtree(Path(uds).parent, ignore_errors=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
