"""Lines of a batch, read by a thread: a pipe without a line keeps no answer waiting."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from quire.cli.run_batch.lines import Line


class LineReader:
    """Reads one line ahead. Its thread ends with the lines, or with the process, which does not wait for it."""

    def __init__(self, lines: Iterator[Line]) -> None:
        self._loop = asyncio.get_running_loop()
        self._read = asyncio.Queue[Line | Exception | None]()  # None: the end
        self._wanted = threading.Semaphore(1)
        threading.Thread(target=self._run, args=(lines,), name="batch lines", daemon=True).start()

    async def next(self) -> Line | None:
        """Return the next line, or None behind the last. Raises what reading has raised."""
        found = await self._read.get()
        self._wanted.release()
        if isinstance(found, Exception):
            raise found
        return found

    def _run(self, lines: Iterator[Line]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and no line is awaited
            try:
                for line in lines:
                    self._put(line)
                self._put(None)
            except Exception as error:  # which `next` raises
                self._put(error)

    def _put(self, found: Line | Exception | None) -> None:
        self._wanted.acquire()
        self._loop.call_soon_threadsafe(self._read.put_nowait, found)
