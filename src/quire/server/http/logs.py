"""Log of the server on stderr: one line of JSON for each HTTP request, plain lines for everything else.

A thread writes, so that a slow, stopped or closed reader of stderr never delays a response. Lines beyond
MAX_WAITING_LINES are dropped.
"""

import contextlib
import logging
import os
import queue
import threading

MAX_WAITING_LINES = 10_000
FLUSH_LIMIT_S = 1.0
_STDERR = 2

requests_log = logging.getLogger("quire.requests")   # its lines are JSON already


class StderrHandler(logging.Handler):
    """Queues lines for the thread that writes them to file descriptor `number`."""

    def __init__(self, number: int = _STDERR) -> None:
        super().__init__()
        self._number = number
        self._lines: queue.Queue[str] = queue.Queue(MAX_WAITING_LINES)
        threading.Thread(target=self._write_lines, name="stderr", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line, or drop it if the queue is full."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(self.format(record) + "\n")

    def flush(self) -> None:
        """Wait up to FLUSH_LIMIT_S for the queued lines."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, FLUSH_LIMIT_S)

    def _write_lines(self) -> None:
        while True:
            line = self._lines.get().encode(errors="backslashreplace")
            with contextlib.suppress(OSError):
                while line:
                    line = line[os.write(self._number, line):]
            self._lines.task_done()


class _Formatter(logging.Formatter):
    """Formats all lines except those of requests, which are JSON already."""

    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage() if record.name == requests_log.name else super().format(record)


def set_up() -> None:
    """Send the log of this process to stderr."""
    handler = StderrHandler()
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s server: %(message)s"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("quire").setLevel(logging.INFO)


def flush() -> None:
    """Wait up to FLUSH_LIMIT_S for the queued lines of all handlers."""
    for handler in logging.getLogger().handlers:
        handler.flush()
