"""`quire top` beside a real server: one screen, JSON, a person's keys in a pseudo-terminal, errors."""

import json
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress

import pytest

from quire.cli.top.top_command import SORTS, Controls
from quire.engine.options import EngineOptions
from support.command_line import Run
from support.openai_server import OpenAIServer, openai_server
from support.server import ENTRY


@pytest.fixture(autouse=True)
def _answers_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.top.reading.TIMEOUT_S", 120.0)


@pytest.fixture(scope="module")
def server() -> Iterator[OpenAIServer]:
    with openai_server(EngineOptions(num_kv_blocks=64)) as server:
        yield server


def test_one_screen_in_a_pipe(run: Run, server: OpenAIServer) -> None:
    ran = run("top", "--url", server.url, "--once", "-i", "0.1")
    assert (ran.code, ran.err) == (0, "")
    assert "requests      running 0" in ran.out
    assert "used 0   cached 0   free 64" in ran.out


def test_json_has_the_same_figures(run: Run, server: OpenAIServer) -> None:
    ran = run("top", "--url", server.url, "--once", "--json", "-i", "0.1")
    found = json.loads(ran.out)
    assert found["all"]["kv_blocks"] == {"free": 64, "cached": 0, "used": 0}
    assert found["all"]["tokens_out"] == 0.0
    assert [each["engine"] for each in found["engines"]] == ["0"]


def test_keys_in_a_terminal(server: OpenAIServer) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 100))
    before = termios.tcgetattr(ours)
    command = [sys.executable, "-c", ENTRY, "top", "--url", server.url, "-i", "0.1"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"})
    os.close(theirs)  # so that reading ends with the process
    try:
        _read_until(ours, b"q quit")
        os.write(ours, b"p")
        _read_until(ours, b"paused")
        os.write(ours, b"pe")
        _read_until(ours, b"finished 0")
        os.write(ours, b"xq")
        with suppress(OSError):     # at the end; a screen that is not read would hold the process up
            while os.read(ours, 4096):
                pass
        assert process.wait(60) == 0
        assert termios.tcgetattr(ours) == before
    finally:
        process.kill()
        os.close(ours)


def _read_until(terminal: int, wanted: bytes) -> None:
    """Read until something is shown; what follows may be in the same piece."""
    seen = b""
    while wanted not in seen:
        seen += os.read(terminal, 4096)


def test_keys_choose() -> None:
    controls = Controls()
    engines = list[int | None]()
    for _ in range(3):
        controls.press("e", 2)
        engines.append(controls.engine)
    assert engines == [0, 1, None]
    for _ in range(len(SORTS) + 1):
        controls.press("s", 2)
    assert controls.sort == 1
    controls.press("p", 2)
    assert (controls.is_paused, controls.is_over) == (True, False)
    controls.press("q", 2)
    assert controls.is_over


@pytest.mark.parametrize("interval", ["0", "nan", "1e9"])
def test_interval_out_of_range_is_refused(run: Run, interval: str) -> None:
    ran = run("top", "-i", interval)
    assert ran.code == 1
    assert "interval must be from 0.1 to 3600 seconds" in ran.err


def test_server_that_is_not_there_is_one_line(run: Run) -> None:
    ran = run("top", "--url", "http://127.0.0.1:1")
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert "http://127.0.0.1:1/metrics: " in ran.err
