"""Log of the server on stderr: one line of JSON for each HTTP request, plain lines for everything else.

A thread writes, so that a slow, stopped or closed reader of stderr never delays a response. Lines beyond
MAX_WAITING_LINES are dropped.
"""

import contextlib
import logging
import os
import threading
import time
from collections import deque

MAX_WAITING_LINES = 10_000
FLUSH_LIMIT_S = 1.0
GATHERING_S = 0.01       # from the first of some lines until they are written
LINES_AT_ONCE = 256
_STDERR = 2

requests_log = logging.getLogger("quire.requests")   # its lines are JSON already


class StderrHandler(logging.Handler):
    """Queues lines for the thread that writes them to file descriptor `number`.

    The thread waits for a moment after a first line, and writes all lines of that moment at once: waking it for each
    request would cost more than writing.
    """

    def __init__(self, number: int = _STDERR) -> None:
        super().__init__()
        self._number = number
        self._lines = deque[str]()
        self._has_lines = threading.Event()
        self._written = threading.Condition()
        threading.Thread(target=self._write_lines, name="stderr", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line, or drop it if the queue is full."""
        if len(self._lines) < MAX_WAITING_LINES:
            self._lines.append(self.format(record) + "\n")
            if not self._has_lines.is_set():
                self._has_lines.set()

    def flush(self) -> None:
        """Wait up to FLUSH_LIMIT_S for the queued lines."""
        with self._written:
            self._written.wait_for(lambda: not (self._lines or self._has_lines.is_set()), FLUSH_LIMIT_S)

    def _write_lines(self) -> None:
        while True:
            self._has_lines.wait()
            time.sleep(GATHERING_S)
            while self._lines:
                lines = [self._lines.popleft() for _ in range(min(len(self._lines), LINES_AT_ONCE))]
                text = "".join(lines).encode(errors="backslashreplace")
                with contextlib.suppress(OSError):
                    while text:
                        text = text[os.write(self._number, text):]
            with self._written:
                self._has_lines.clear()
                if self._lines:                 # queued since the last look
                    self._has_lines.set()
                self._written.notify_all()


class _Formatter(logging.Formatter):
    """Formats all lines except those of requests, which are JSON already."""

    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage() if record.name == requests_log.name else super().format(record)


def set_up() -> None:
    """Send the log of this process to stderr."""
    handler = StderrHandler()
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s server: %(message)s"))
    logging.basicConfig(handlers=[handler])
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # no line has them
    logging.getLogger("quire").setLevel(logging.INFO)


def flush() -> None:
    """Wait up to FLUSH_LIMIT_S for the queued lines of all handlers."""
    for handler in logging.getLogger().handlers:
        handler.flush()
