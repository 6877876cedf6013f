"""Kill matrix of two nodes: each process is killed and stopped in each phase; both nodes end, and a restart serves.

A process that computes ends the run, killed or stopped. A process that only supervises, the server of node 0 and the
command of node 1, ends it if it is killed; if it is stopped, the run goes on when it is continued. `make matrix` runs
all rows between two network namespaces, or between two addresses where the system does not permit these.
"""

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import LLM, SamplingParams
from quire.kernels.cpp.back_end import usable_isas
from support.namespaces import Machine, loopback_addresses, may_make_namespaces, two_namespaces
from support.nodes import NodeCommand, free_port, marked_pids
from support.server import ServerProcess, wait_until

pytestmark = pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")

PROCESSES = ("server", "engine", "command", "member")
PHASES = ("joining", "loading", "idle", "prefill", "decode", "leaving")
SUPERVISORS = ("server", "command")
FEW = [("server", "prefill", "kill"), ("command", "idle", "stop")]
STALL_LIMIT_S = 10  # of a busy machine: loading torch holds up heartbeats for seconds
PROMPT = {"prompt": [5, 6, 7] * 20, "temperature": 0, "ignore_eos": True}
LONG = {"prompt": [8, 9] * 450}


class Run:
    """A server and the command of node 1, on a machine each; `url` is a socket in a file."""

    def __init__(self, model: Path, machines: tuple[Machine, Machine], folder: Path, port: int) -> None:
        (folder / "secret").write_text("0123456789abcdef")
        self._socket, (first, second) = folder / "http.sock", machines
        self._flags = [
            str(model), "-tp", "2", "--nnodes", "2", "--master-addr", first.address, "--master-port", str(port),
            "--node-secret-file", str(folder / "secret"), "--num-kv-blocks", "64", "--max-num-batched-tokens", "16",
            "--stall-limit", str(STALL_LIMIT_S), "--start-timeout", "60", "--shutdown-timeout", "60",
        ]  # fmt: skip
        self._machines, self._mark = (first, second), uuid.uuid4().hex
        self.server: ServerProcess | None = None
        self.command: NodeCommand | None = None

    def start_server(self) -> None:
        self._socket.unlink(missing_ok=True)
        flags = [*self._flags, "--uds", str(self._socket)]
        self.server = ServerProcess(*flags, env={"NODE_MARK": self._mark}, command=self._machines[0].prefix)

    def start_command(self) -> None:
        self.command = NodeCommand(*self._flags, "--node-rank", "1", within=self._machines[1].prefix)

    def start(self) -> None:
        self.start_server()
        self.start_command()

    def wait_ready(self) -> None:
        assert self.server is not None
        self.server.wait_ready()

    def client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.HTTPTransport(uds=str(self._socket)), base_url="http://node", timeout=120)

    def token_ids(self) -> list[int]:
        body = PROMPT | {"max_tokens": 8, "return_token_ids": True}
        with self.client() as client:
            return client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]

    def pid(self, process: str) -> int | None:
        """Return a process, None while it has not been started."""
        if process in ("server", "engine"):
            assert self.server is not None
            found = [self.server.pid] if process == "server" else _engines(self.server)
        else:
            assert self.command is not None
            own = self.command.process.pid
            found = [own] if process == "command" else [pid for pid in self.command.pids() if pid != own]
        return found[0] if found else None

    def pids(self) -> list[int]:
        """Return all processes that run."""
        return marked_pids(self._mark) + ([] if self.command is None else self.command.pids())

    def close(self) -> None:
        if self.command is not None:
            self.command.close()
        for pid in marked_pids(self._mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.server is not None:
            self.server.close()


def _engines(server: ServerProcess) -> list[int]:
    return [pid for pid in server.child_pids() if b"quire.engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@contextmanager
def machines_of(kind: str) -> Iterator[tuple[Machine, Machine]]:
    if kind == "addresses":
        yield loopback_addresses()
        return
    if not may_make_namespaces():
        pytest.skip("the system does not permit network namespaces (ip netns)")
    with two_namespaces() as machines:
        yield machines


class Asking(threading.Thread):
    """A request that runs while a process is killed; its tokens so far, and how it ended."""

    def __init__(self, run: Run, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._run, self._body = run, PROMPT | body | {"stream": True}
        self.num_events, self.has_all = 0, False
        self.start()

    def run(self) -> None:
        with (
            suppress(httpx.HTTPError), self._run.client() as client,
            client.stream("POST", "/v1/completions", json=self._body) as response,
        ):  # fmt: skip
            for line in response.iter_lines():
                self.has_all |= line == "data: [DONE]"
                self.num_events += line.startswith("data: {")


def reach(run: Run, phase: str, process: str) -> Asking | None:
    """Bring a run to a phase; return the request that runs in it."""
    if phase == "joining":  # the other node has not been started
        (run.start_server if process in ("server", "engine") else run.start_command)()
        wait_until(lambda: run.pid(process) is not None)
        return None
    run.start()
    if phase == "loading":
        wait_until(lambda: (pid := run.pid("member")) is not None and _has_torch(pid))  # it has joined
        return None
    run.wait_ready()
    if phase == "idle":
        return None
    asking = Asking(run, LONG | {"max_tokens": 8} if phase == "prefill" else {"max_tokens": 400})
    if phase == "prefill":
        wait_until(lambda: _num_running(run) == 1)
        return asking
    wait_until(lambda: asking.num_events > 1)
    if phase == "leaving":
        assert run.server is not None
        run.server.signal(signal.SIGTERM)
    return asking


def _has_torch(pid: int) -> bool:
    with suppress(OSError):
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    return False


def _num_running(run: Run) -> int:
    with run.client() as client:
        lines = client.get("/metrics").text.splitlines()
    return next(int(float(line.split()[-1])) for line in lines if line.startswith("vllm:num_requests_running{"))


def check_row(process: str, phase: str, fault: str, model: Path, kind: str, folder: Path) -> None:
    """Run a row: reach the phase, strike the process, watch the end, start again."""
    with machines_of(kind) as machines, ExitStack() as stack:
        port = free_port() if kind == "addresses" else 29501

        def new_run() -> Run:
            run = Run(model, machines, folder, port)
            stack.callback(run.close)
            return run

        run = new_run()
        asking = reach(run, phase, process)
        pid = run.pid(process)
        assert pid is not None
        if fault == "stop" and process in SUPERVISORS:
            goes_on(run, pid, phase, asking)
        else:
            os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            wait_until(lambda: not run.pids())
            if asking is not None:
                asking.join(60)
                assert not asking.is_alive(), "a request without an end"
        again = new_run()
        again.start()
        again.wait_ready()
        assert again.token_ids() == expected_tokens(model)
        assert again.server is not None
        assert again.command is not None
        again.server.signal(signal.SIGTERM)
        assert again.server.wait() == 0
        status, output = again.command.wait(60)
        assert (status, output.splitlines()[-1]) == (1, "quire: rank 0 was closed")
        assert not again.pids()


def goes_on(run: Run, pid: int, phase: str, asking: Asking | None) -> None:
    """Stop a process that supervises for longer than the limit of those that compute, continue it, and end the run."""
    others = set(run.pids())
    os.kill(pid, signal.SIGSTOP)
    time.sleep(STALL_LIMIT_S + 2)
    assert phase in ("joining", "leaving") or others <= set(run.pids()), "the run has ended"
    os.kill(pid, signal.SIGCONT)
    if phase == "joining":
        (run.start_command if run.command is None else run.start_server)()
    if phase in ("joining", "loading"):
        run.wait_ready()
    if asking is not None:
        asking.join(120)
        assert asking.has_all, "a request that was not answered"
    if phase != "leaving":
        assert run.server is not None
        run.server.signal(signal.SIGTERM)
    wait_until(lambda: not run.pids())


_EXPECTED: dict[Path, list[int]] = {}


def expected_tokens(model: Path) -> list[int]:
    """Return the tokens of one process."""
    if model not in _EXPECTED:
        with LLM(model, num_kv_blocks=64, max_num_batched_tokens=16) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            (output,) = llm.generate([PROMPT["prompt"]], params, use_tqdm=False)  # type: ignore[list-item]
        _EXPECTED[model] = list(output.outputs[0].token_ids)
    return _EXPECTED[model]


@pytest.mark.parametrize(("process", "phase", "fault"), FEW)
def test_both_nodes_end_and_a_restart_serves(
    process: str, phase: str, fault: str, demo_model: Path, tmp_path: Path
) -> None:
    check_row(process, phase, fault, demo_model, "addresses", tmp_path)


def test_nodes_in_namespaces_end_and_a_restart_serves(demo_model: Path, tmp_path: Path) -> None:
    check_row("engine", "loading", "kill", demo_model, "namespaces", tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize(("process", "phase", "fault"), list(product(PROCESSES, PHASES, ("kill", "stop"))))
def test_kill_matrix(process: str, phase: str, fault: str, demo_model: Path, tmp_path: Path) -> None:
    kind = "namespaces" if may_make_namespaces() else "addresses"
    check_row(process, phase, fault, demo_model, kind, tmp_path)
