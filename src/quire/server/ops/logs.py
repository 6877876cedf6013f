"""What the server writes to stderr: one line of JSON for each HTTP request, and plain lines for everything else.

A thread writes, so that a reader of stderr who is slow, stuck or gone never holds up an answer. Lines that he does not
take in time are dropped.
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
    """Hands lines to the thread that writes them. `number` is the file's."""

    def __init__(self, number: int = _STDERR) -> None:
        super().__init__()
        self._number = number
        self._lines: queue.Queue[str] = queue.Queue(MAX_WAITING_LINES)
        threading.Thread(target=self._write_lines, name="stderr", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line, or drop it."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(self.format(record) + "\n")

    def flush(self) -> None:
        """Wait a moment for what is queued."""
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
    """Leaves the lines about requests as they are."""

    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage() if record.name == requests_log.name else super().format(record)


def set_up() -> None:
    """Write the log of this process to stderr."""
    handler = StderrHandler()
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s server: %(message)s"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("quire").setLevel(logging.INFO)


def flush() -> None:
    """Wait a moment for lines that have not been written."""
    for handler in logging.getLogger().handlers:
        handler.flush()
