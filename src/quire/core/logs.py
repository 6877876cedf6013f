"""Log of all processes of a server: level, form and place of its lines, which child processes inherit.

The server's requests have a line each, which is JSON; all other lines are text (`mixed`, the default), or all lines are
JSON, or all are text. Lines go to standard error or to a file that may be renamed at any time: it is opened again when
its name stands for another one. In the server a thread writes, so that a slow, stopped or closed reader never delays a
response: lines beyond MAX_WAITING_LINES are dropped.
"""

import contextlib
import faulthandler
import json
import logging
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

Level = Literal["debug", "info", "warning", "error", "critical"]
Form = Literal["mixed", "text", "json"]

MAX_WAITING_LINES = 10_000
FLUSH_LIMIT_S, LOOKS_PER_LIMIT = 1.0, 10
GATHERING_S = 0.01       # from the first of some lines until they are written
LINES_AT_ONCE = 256
FILE_MODE = 0o600
_STDERR = 2
_LEVEL, _FORM, _FILE = "QUIRE_LOG_LEVEL", "QUIRE_LOG_FORMAT", "QUIRE_LOG_FILE"  # the variables of the flags, too

requests_log = logging.getLogger("quire.requests")   # its messages are JSON already


def share(level: Level, form: Form, file: str | None) -> None:
    """Set the log of this process and of its children, before they set it up. OSError if the file cannot be opened."""
    os.environ[_LEVEL], os.environ[_FORM] = level, form
    os.environ.pop(_FILE, None)
    if file is not None:
        LogFile(file).write(b"")
        os.environ[_FILE] = os.path.abspath(file)


def set_up(process: str, least: int = logging.NOTSET) -> None:
    """Set up the log of this process, which the lines name, for levels from `least` on; the server's has a thread."""
    file = LogFile(os.environ.get(_FILE))
    handler = QueueingHandler(file) if process == "server" else WritingHandler(file)
    handler.setFormatter(Formatter(process, os.environ.get(_FORM, "mixed")))
    level = logging.getLevelNamesMapping().get(os.environ.get(_LEVEL, "info").upper(), logging.INFO)
    level = max(level, least)
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING))
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # no line has them
    logging.getLogger("quire").setLevel(level)


def flush() -> None:
    """Wait up to FLUSH_LIMIT_S for the queued lines of all handlers."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def log_stacks(log: logging.Logger) -> None:
    """Log the stacks of all threads of this process. A thread that keeps Python's lock is waited for."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        log.error("stacks of all threads:\n%s", file.read().decode(errors="replace").rstrip())


class Formatter(logging.Formatter):
    """Formats the lines of a process, which `process` names."""

    def __init__(self, process: str, form: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process}: %(message)s")
        self._process, self._form = process, form

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, without its end."""
        is_request = record.name == requests_log.name
        if self._form == "mixed":
            return record.getMessage() if is_request else super().format(record)
        if self._form == "text":
            if is_request:
                told = {"msg": _text_of(json.loads(record.getMessage())), "args": ()}
                record = logging.makeLogRecord(record.__dict__ | told)
            return super().format(record)
        level = record.levelname.lower()
        origin = {"level": level, "process": self._process, "logger": record.name}
        if is_request:
            return f"{json.dumps(origin)[:-1]}, {record.getMessage()[1:]}"
        time_of = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time_of, **origin, "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _text_of(line: Mapping[str, Any]) -> str:
    """Return the line of a request as text; values with anything but plain characters are quoted."""
    rest = {name: value for name, value in line.items() if name not in {"time", "method", "path", "status"}}
    status = "-" if line["status"] is None else line["status"]
    fields = " ".join(f"{name}={_plain(value)}" for name, value in rest.items())
    return f"{line['method']} {_plain(line['path'])} {status} {fields}"


def _plain(value: object) -> str:
    if isinstance(value, list):
        value = ",".join(map(str, value))
    text = value if isinstance(value, str) else json.dumps(value)
    return text if text.isascii() and text.isprintable() and not set(' "=').intersection(text) else json.dumps(text)


class LogFile:
    """Place of the lines: standard error, or the file that has this name whenever something is written."""

    def __init__(self, path: str | None, number: int = _STDERR) -> None:
        self._path, self._number = path, number if path is None else None

    def write(self, text: bytes) -> None:
        """Write all of a text. OSError if that cannot be done."""
        number = self._opened()
        while text:
            text = text[os.write(number, text):]

    def _opened(self) -> int:
        if self._path is not None and not (self._number is not None and _is_at(self._path, self._number)):
            if self._number is not None:
                os.close(self._number)
            self._number = None
            self._number = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        assert self._number is not None, "the file is open"
        return self._number


def _is_at(path: str, number: int) -> bool:
    """Return whether an open file is the one of a path."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(number))
    except FileNotFoundError:
        return False


class WritingHandler(logging.Handler):
    """Writes each line at once."""

    def __init__(self, file: LogFile) -> None:
        super().__init__()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; it is lost if that cannot be done."""
        with contextlib.suppress(OSError):
            self._file.write(f"{self.format(record)}\n".encode(errors="backslashreplace"))


class QueueingHandler(logging.Handler):
    """Queues lines for the thread that writes them.

    The thread waits for a moment after a first line, and writes all lines of that moment at once: waking it for each
    request would cost more than writing.
    """

    def __init__(self, file: LogFile) -> None:
        super().__init__()
        self._file = file
        self._lines = deque[str]()
        self._has_lines = threading.Event()
        self._written = threading.Condition()
        threading.Thread(target=self._write_lines, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line, or drop it if the queue is full."""
        if len(self._lines) < MAX_WAITING_LINES:
            self._lines.append(self.format(record) + "\n")
            if not self._has_lines.is_set():
                self._has_lines.set()

    def flush(self) -> None:
        """Wait up to FLUSH_LIMIT_S for the queued lines; longer, if the machine stops the process meanwhile."""
        with self._written:
            for _ in range(LOOKS_PER_LIMIT):
                if self._written.wait_for(self._has_written, FLUSH_LIMIT_S / LOOKS_PER_LIMIT):
                    return

    def _has_written(self) -> bool:
        return not (self._lines or self._has_lines.is_set())

    def _write_lines(self) -> None:
        while True:
            self._has_lines.wait()
            time.sleep(GATHERING_S)
            while self._lines:
                lines = [self._lines.popleft() for _ in range(min(len(self._lines), LINES_AT_ONCE))]
                with contextlib.suppress(OSError):
                    self._file.write("".join(lines).encode(errors="backslashreplace"))
            with self._written:
                self._has_lines.clear()
                if self._lines:                 # queued since the last look
                    self._has_lines.set()
                self._written.notify_all()
