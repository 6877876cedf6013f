"""The log must never hold the server up."""

import json
import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from quire.core import logs
from quire.core.logs import MAX_WAITING_LINES, Formatter, LogFile, QueueingHandler, WritingHandler
from support.server import ServerProcess, engine_pids, wait_until

REQUEST = {
    "time": "now", "method": "GET", "path": "/a b=\n", "status": None, "duration_s": 0.25, "finish_reasons": ["stop"],
}  # fmt: skip


def record(message: str, name: str = "quire", error: Exception | None = None) -> logging.LogRecord:
    failure = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord(name, logging.INFO, "", 0, message, None, failure)


@pytest.fixture(autouse=True)
def _flushes_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a flush wait for a thread that the machine has stopped for a while."""
    monkeypatch.setattr(logs, "FLUSH_LIMIT_S", 120.0)


def test_lines_are_written_in_order() -> None:
    reading, writing = os.pipe()
    handler = QueueingHandler(LogFile(None, writing))
    for number in range(100):
        handler.handle(record(f"line {number} \udc80"))
    handler.flush()
    assert os.read(reading, 65536).decode().splitlines() == [f"line {number} \\udc80" for number in range(100)]


def test_stuck_reader_costs_lines_and_no_time() -> None:
    reading, writing = os.pipe()
    handler = QueueingHandler(LogFile(None, writing))
    for _ in range(2 * MAX_WAITING_LINES):
        handler.handle(record("x" * 100))  # would hang
    assert MAX_WAITING_LINES - 1500 < len(handler._lines) <= MAX_WAITING_LINES, "fewer are under way"
    os.close(reading)


def test_closed_reader_disturbs_no_one_else() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    handler = QueueingHandler(LogFile(None, writing))
    handler.handle(record("this is not read"))
    handler.flush()
    again, os_writing = os.pipe()
    os.dup2(os_writing, writing)
    handler.handle(record("but this"))
    assert os.read(again, 100) == b"but this\n"


@pytest.mark.parametrize("kind", [WritingHandler, QueueingHandler])
def test_file_is_opened_again_where_it_was_renamed_or_removed(
    kind: type[WritingHandler | QueueingHandler], tmp_path: Path
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    path = folder / "log"
    handler = kind(LogFile(str(path)))

    def written(message: str) -> str:
        handler.handle(record(message))
        handler.flush()
        return path.read_text()

    assert written("one") == "one\n"
    assert path.stat().st_mode & 0o777 == 0o600
    path.rename(folder / "log.1")
    assert written("two") == "two\n"
    path.unlink()
    assert written("three \udc80") == "three \\udc80\n"
    with path.open("r+b") as truncated:
        truncated.truncate()
    assert written("four") == "four\n", "appended, as copytruncate needs"
    assert (folder / "log.1").read_text() == "one\n"
    path.unlink()
    folder.rename(tmp_path / "gone")
    handler.handle(record("five"))  # nothing can be written
    handler.flush()


def test_forms_of_lines() -> None:
    request = record(json.dumps(REQUEST), "quire.requests")
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        failure = record("it\nfailed", "quire.x", error)
    mixed, text, form = (Formatter("engine", each) for each in ("mixed", "text", "json"))
    assert json.loads(mixed.format(request)) == REQUEST
    pattern = r"\d{4}-\S+ \S+ INFO engine: it\nfailed\nTraceback .*ValueError: a\nb"
    assert re.fullmatch(pattern, mixed.format(failure), re.DOTALL)
    assert text.format(failure) == mixed.format(failure)
    line = text.format(request)
    assert line.endswith(' INFO engine: GET "/a b=\\n" - duration_s=0.25 finish_reasons=stop')
    origin = {"level": "info", "process": "engine", "logger": "quire.requests"}
    assert json.loads(form.format(request)) == origin | REQUEST
    told = json.loads(form.format(failure))
    assert (told["message"], told["logger"], told["process"]) == ("it\nfailed", "quire.x", "engine")
    assert told["exception"].endswith("ValueError: a\nb")
    assert told["time"].endswith("+00:00")
    assert "\n" not in form.format(failure) + form.format(request)


def test_every_line_of_all_processes_is_json_in_one_file(demo_model: Path, tmp_path: Path) -> None:
    path, moved = tmp_path / "quire.log", tmp_path / "quire.log.1"
    arguments = ["--log-format", "json", "--log-requests", "0.5", "--quantization", "int8", "--port", "0"]
    server = ServerProcess(str(demo_model), *arguments, "--log-file", str(path), is_forked=True)
    try:
        def lines(*files: Path) -> list[dict[str, Any]]:
            read = (file.read_text() for file in files if file.exists())
            return [json.loads(line) for text in read for line in text[: text.rfind("\n") + 1].splitlines()]

        def asked() -> list[str]:
            return [line["path"] for line in lines(moved, path) if line["logger"] == "quire.requests"]

        def ready() -> list[str]:
            told = [line.get("message", "") for line in lines(path)]
            return [message.rpartition(" ")[2] for message in told if "is serving" in message]

        wait_until(lambda: bool(ready()))
        (server.url,) = ready()
        path.rename(moved)
        statuses = [server.get(route).status_code for route in ("/version", "/x", "/v1/models", "/ping", "/version")]
        (engine,) = engine_pids(server)
        os.kill(engine, signal.SIGUSR1)
        wait_until(lambda: any("stacks" in line.get("message", "") for line in lines(path)))
        wait_until(lambda: len(asked()) >= 3)
        assert server.stop() == 0
        told = lines(moved, path)
        assert (server.log, server.out) == ("", "")
    finally:
        server.close()
    assert {line["process"] for line in told} == {"server", "engine"}
    assert all(line.keys() >= {"time", "level", "process", "logger"} for line in told)
    assert statuses == [200, 404, 200, 200, 200]
    assert asked() == ["/version", "/x", "/v1/models"], "each second one, and what fails"


def test_settings_are_those_of_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("QUIRE_LOG_LEVEL", "QUIRE_LOG_FORMAT", "QUIRE_LOG_FILE"):
        monkeypatch.setenv(name, "of another server")
    logs.share("error", "text", None)
    assert (os.environ["QUIRE_LOG_LEVEL"], os.environ["QUIRE_LOG_FORMAT"]) == ("error", "text")
    assert "QUIRE_LOG_FILE" not in os.environ
    with pytest.raises(FileNotFoundError):
        logs.share("error", "text", str(tmp_path / "none" / "log"))
