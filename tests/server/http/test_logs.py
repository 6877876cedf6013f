"""The log must never hold the server up."""

import logging
import os

from quire.server.http.logs import MAX_WAITING_LINES, StderrHandler


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord("quire", logging.INFO, "", 0, message, None, None)


def test_lines_are_written_in_order() -> None:
    reading, writing = os.pipe()
    handler = StderrHandler(writing)
    for number in range(100):
        handler.handle(record(f"line {number} \udc80"))
    handler.flush()
    assert os.read(reading, 65536).decode().splitlines() == [f"line {number} \\udc80" for number in range(100)]


def test_stuck_reader_costs_lines_and_no_time() -> None:
    reading, writing = os.pipe()
    handler = StderrHandler(writing)
    for _ in range(2 * MAX_WAITING_LINES):
        handler.handle(record("x" * 100))  # would hang
    assert MAX_WAITING_LINES - 1500 < len(handler._lines) <= MAX_WAITING_LINES, "fewer are under way"
    os.close(reading)


def test_closed_reader_disturbs_nobody() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    handler = StderrHandler(writing)
    handler.handle(record("nobody reads this"))
    handler.flush()
    again, os_writing = os.pipe()
    os.dup2(os_writing, writing)
    handler.handle(record("but this"))
    assert os.read(again, 100) == b"but this\n"
