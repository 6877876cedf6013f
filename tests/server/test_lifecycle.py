"""Real servers, from their start to their end, whatever ends them."""

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from support import held_starts
from support.engine_process import open_files
from support.server import ANSWER_LIMIT_S, ENTRY, ServerProcess, is_running, running_server, wait_until
from support.stopping import stopped

pytestmark = pytest.mark.usefixtures("demo_model")

SMALL = ("--num-kv-blocks", "512")
PATIENT = ("--stall-limit", "600", "--shutdown-timeout", "600")
STAYS_UNHEALTHY = f"from quire.server import lifecycle; lifecycle.UNHEALTHY_S = 600; {ENTRY}"
# The signal comes in a callback of a weak reference, as the import system has one at the end of each import.
STOPPED_AT_AN_IMPORT = """
import os, signal, sys, weakref

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "quire.server.lifecycle":
            lock = type("Lock", (), {})()
            ended = weakref.ref(lock, lambda _: os.kill(os.getpid(), signal.SIGTERM))
            del lock

sys.meta_path.insert(0, Finder())
"""
LONG = {"prompt": "def ", "max_tokens": 1900, "ignore_eos": True}
SHORT = {"prompt": "def ", "max_tokens": 3}


@contextmanager
def open_stream(server: ServerProcess, **fields: object) -> Iterator[Iterator[str]]:
    """Ask for a stream; yield its events once it has begun, which needs no token."""
    body = LONG | {"stream": True} | fields
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=ANSWER_LIMIT_S) as response:
        assert response.status_code == 200, response.read()
        yield (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def assert_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def test_server_says_what_it_has_and_ends_when_told() -> None:
    with running_server(*SMALL, "--served-model-name", "one", "--served-model-name", "two", is_new=True) as server:
        *table, line = server.out.splitlines()
        assert re.fullmatch(r"Quire is serving one on http://127\.0\.0\.1:\d+", line)
        assert {"weights", "KV", "swap", "longest"} <= {row.split()[0] for row in table}
        assert any("512 blocks of 16: 8,192 tokens" in row for row in table)
        for name in ("one", "two"):
            assert server.post("/v1/completions", SHORT | {"model": name}).json()["model"] == name
        pids = [server.pid, *server.child_pids()]
        with httpx.Client(timeout=ANSWER_LIMIT_S) as idle, socket.create_connection(("127.0.0.1", server.port)) as half:
            assert idle.get(f"{server.url}/health").status_code == 200
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Le")
            wait_until(lambda: server.log.count('"path"') == 2)     # a server that ends waits for its log only briefly
            assert server.stop() == 0
        assert_gone(pids)
        lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
        assert [(line["path"], line["status"]) for line in lines] == [("/v1/completions", 200)] * 2
        assert [line["output_tokens"] for line in lines] == [3, 3]
        written = [json.dumps(line | {"request_id": ""}) for line in lines]  # the id is of random digits
        assert not any("def" in line for line in written)


def test_open_requests_end_before_a_server_that_drains() -> None:
    with running_server(*SMALL, *PATIENT) as server:
        with ExitStack() as answering:
            with stopped(server.engine_pid()):  # else all might be over before we have looked
                events = answering.enter_context(open_stream(server))
                server.signal(signal.SIGTERM)
                wait_until(lambda: server.get("/ready").status_code == 503)
                refused = server.post("/v1/completions", SHORT)
                assert code_of(refused) == (503, "shutting_down")
                assert int(refused.headers["Retry-After"]) >= 1
                assert server.get("/health").status_code == 200
            *_, finish, done = events
        assert json.loads(finish)["choices"][0]["finish_reason"] == "length"
        assert done == "[DONE]"
        assert server.wait() == 0


def test_requests_that_outlast_the_drain_are_told() -> None:
    with running_server(*SMALL, "--shutdown-timeout", "0.1") as server:
        pids, engine = server.child_pids(), server.engine_pid()
        with stopped(engine), open_stream(server) as events:
            server.signal(signal.SIGTERM)
            *_, last, done = events
        assert json.loads(last)["error"]["code"] == "shutting_down"
        assert done == "[DONE]"
        assert server.wait() == 0
        assert_gone(pids)


def test_second_signal_ends_everything_at_once() -> None:
    with running_server(*SMALL, *PATIENT) as server:
        pids, engine = server.child_pids(), server.engine_pid()
        with stopped(engine), open_stream(server):
            server.signal(signal.SIGINT)
            wait_until(lambda: server.get("/ready").status_code == 503)
            server.signal(signal.SIGTERM)
            assert server.wait() == 128 + signal.SIGTERM
        assert_gone(pids)


@pytest.mark.parametrize("entry", [ENTRY, STAYS_UNHEALTHY], ids=["by itself", "when told"])
def test_server_ends_with_its_engine(entry: str) -> None:
    with running_server(*SMALL, entry=entry) as server:
        pids, engine = server.child_pids(), server.engine_pid()
        with stopped(engine), open_stream(server) as events:  # else all might be over before it is killed
            os.kill(engine, signal.SIGKILL)
            *_, last, done = events
        assert json.loads(last)["error"]["code"] == "engine_unhealthy"
        assert done == "[DONE]"
        if entry == STAYS_UNHEALTHY:
            assert code_of(server.get("/health")) == (503, "engine_unhealthy")
            assert code_of(server.post("/v1/completions", SHORT)) == (503, "engine_unhealthy")
            server.signal(signal.SIGTERM)
        assert server.wait() == 1
        assert "killed by signal 9" in server.log
        assert_gone(pids)


def test_engine_ends_with_its_server() -> None:
    with running_server(*SMALL) as server:
        pids = server.child_pids()
        with open_stream(server):
            server.process.kill()
        assert_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_server_that_loads_can_be_stopped(number: signal.Signals) -> None:
    server = ServerProcess("--port", "0", *SMALL, entry=held_starts.EACH)
    try:
        engine = held_starts.held_engine(server)
        server.signal(number)
        assert server.wait() == 128 + number
        assert_gone([engine])
        assert server.out == ""
        assert "Traceback" not in server.log
    finally:
        server.close()


def test_server_that_imports_can_be_stopped() -> None:
    server = ServerProcess("--port", "0", *SMALL, entry=STOPPED_AT_AN_IMPORT + ENTRY)
    try:
        assert server.wait() == 128 + signal.SIGTERM
        assert server.out == ""
        assert "Exception ignored" not in server.log
    finally:
        server.close()


def test_engine_that_hangs_at_its_start_is_given_up() -> None:
    server = ServerProcess("--port", "0", "--start-timeout", "1", entry=held_starts.EACH)
    try:
        assert server.wait() == 1
        (line,) = server.log.splitlines()
        assert line.startswith("quire: the engine process gave no sign of life for 1 s while it started")
    finally:
        server.close()


def test_closed_standard_streams_do_not_disturb() -> None:
    with running_server(*SMALL, command=("/bin/sh", "-c", 'exec "$@" <&- 2>&-', "sh")) as server:
        for _ in range(3):
            response = server.post("/v1/completions", SHORT)
            assert response.json()["usage"]["completion_tokens"] == 3
        assert server.stop() == 0


def failed_start(*arguments: str, is_forked: bool = False) -> tuple[int, str]:
    """Return the exit status and what a server that cannot start says on stderr."""
    server = ServerProcess(*arguments, is_forked=is_forked)
    try:
        status = server.wait()
        assert server.out == ""
        return status, server.log
    finally:
        server.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("/no/such/model", "--port", "0"), ["/no/such/model"]),
        (("--max-model-len", "100000", "--port", "0"), ["max_model_len", "100000", "2048"]),
        (("--kv-cache-memory", "1", "--port", "0"), ["kv_cache_memory", "49152"]),
    ],
)
def test_what_cannot_work_is_told_in_one_line(arguments: tuple[str, ...], words: list[str]) -> None:
    status, log = failed_start(*arguments, is_forked=True)
    assert (status, log.count("\n")) == (1, 1)
    assert [word for word in words if word not in log] == []


def test_taken_port_is_told_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, log = failed_start("--port", str(port), "/no/such/model")
    assert status == 1
    in_use = rf"quire: port {port} of host 127\.0\.0\.1 is in use: (--port \d+ is free, and )?--port 0 .*\n"
    assert re.fullmatch(in_use, log)


def test_nothing_but_the_port_listens() -> None:
    with running_server(*SMALL, is_new=True) as server:
        inodes = set[str]()
        for pid in [server.pid, *server.child_pids()]:
            inodes |= {target[8:-1] for target in open_files(pid) if target.startswith("socket:[")}
        listening = [
            fields[1]
            for table in ("tcp", "tcp6")
            for fields in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:])
            if fields[3] == "0A" and fields[9] in inodes
        ]
        assert [int(address.rpartition(":")[2], 16) for address in listening] == [server.port]
