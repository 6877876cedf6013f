"""Client end of the engine's socket pair: the handshake of its start, frames in both directions, and its end."""

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from quire.core.frames import LENGTH_BYTES
from quire.engine import messages
from quire.engine.formats import TokenizerUse, load_tokenizer
from quire.engine.launcher import EngineProcess
from quire.engine.messages import EngineDeadError, Report
from quire.engine.processes.liveness import with_start_timeout
from quire.text.tokenizer import Tokenizer

ReportT = TypeVar("ReportT", messages.Located, messages.Ready)


class EngineConnection:
    """An engine process that is ready, and the streams of the socket to it. Get one from `open`."""

    def __init__(
        self, engine: EngineProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
        tokenizer: Tokenizer | None, ready: messages.Ready,
    ) -> None:  # fmt: skip
        self.engine, self.tokenizer, self.ready = engine, tokenizer, ready
        self._writer = writer
        # Waits for the next report. EOFError or ConnectionError when the engine is gone.
        self.receive = partial(_receive, reader)

    @classmethod
    async def open(
        cls, engine: EngineProcess, start_timeout_s: float, tokenizer_use: TokenizerUse = "optional",
        tokenizer: Tokenizer | None = None,
    ) -> Self:  # fmt: skip
        """Wait until the engine is ready. Errors as in `EngineClient.connect`; after one the process has ended.

        `tokenizer`: read already; else that of the folder that the engine names is read.
        """
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_unix_connection(sock=engine.connection)
            handshake = _handshake(reader, tokenizer_use, tokenizer)
            tokenizer, ready = await with_start_timeout(handshake, engine.process.pid, start_timeout_s)
        except BaseException as error:
            if writer is not None:
                writer.transport.abort()
            status = await asyncio.to_thread(engine.stop)
            if isinstance(error, (EOFError, ConnectionError)):
                raise EngineDeadError(f"the engine process ended while it loaded ({_exit_text(status)})") from error
            raise
        return cls(engine, reader, writer, tokenizer, ready)

    def send(self, message: bytes) -> None:
        """Send a frame. A connection that is closing drops it: its reader finds the end."""
        if not self._writer.is_closing():
            self._writer.write(message)

    async def drain(self) -> None:
        """Wait until the engine has taken most of what was sent. ConnectionError if it is gone."""
        await self._writer.drain()

    def abort(self) -> None:
        """Close the connection at once; `receive` raises."""
        self._writer.transport.abort()

    def kill(self) -> None:
        """End the process at once, and close the connection; `receive` raises."""
        self.engine.kill()
        self.abort()

    async def stop(self) -> str:
        """Close the connection and end the process, if it still runs; return how it ended, as text."""
        self.abort()
        thread = ThreadPoolExecutor(1, "engine stop")  # separate: other work must not delay a death
        try:
            return _exit_text(await asyncio.get_running_loop().run_in_executor(thread, self.engine.stop))
        finally:
            thread.shutdown(wait=False)


async def _handshake(
    reader: asyncio.StreamReader, tokenizer_use: TokenizerUse, tokenizer: Tokenizer | None
) -> tuple[Tokenizer | None, messages.Ready]:
    """Wait for the engine's two reports of its start; read the tokenizer between them, unless it is given."""
    located = await _expect(reader, messages.Located)
    if tokenizer is None:
        tokenizer = await asyncio.to_thread(load_tokenizer, Path(located.folder), tokenizer_use)
    return tokenizer, await _expect(reader, messages.Ready)


async def _expect(reader: asyncio.StreamReader, kind: type[ReportT]) -> ReportT:
    """Wait for a report of this kind. Raises the error of a `Failed`."""
    report = await _receive(reader)
    if isinstance(report, messages.Failed):
        raise messages.error_from(report)
    assert isinstance(report, kind), f"expected {kind.__name__}, got {report}"
    return report


async def _receive(reader: asyncio.StreamReader) -> Report:
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    return messages.decode_report(await reader.readexactly(length))


def _exit_text(status: int) -> str:
    """Return an exit status as text."""
    return f"exit status {status}" if status >= 0 else f"killed by signal {-status}, {signal.strsignal(-status)}"
