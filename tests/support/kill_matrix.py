"""Rows of a kill matrix: a run of several processes reaches a phase, and one of them is killed or stopped.

A process that computes ends the run, killed or stopped. One that only supervises ends it if it is killed; if it is
stopped, the run goes on when it is continued.
"""

import os
import signal
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from quire import LLM, SamplingParams
from support.nodes import marked_pids
from support.server import ServerProcess, engine_pids, wait_until

STALL_LIMIT_S = 10  # for a busy machine: loading torch holds up heartbeats for seconds
FLAGS = [
    "-tp", "2", "--nnodes", "2", "--num-kv-blocks", "64", "--max-num-batched-tokens", "16",
    "--stall-limit", str(STALL_LIMIT_S), "--start-timeout", "60", "--shutdown-timeout", "60",
]  # fmt: skip
PROMPT = {"prompt": [5, 6, 7] * 20, "temperature": 0, "ignore_eos": True}
LONG = {"prompt": [8, 9] * 450}


class Run(ABC):
    """A server with `FLAGS` and more, at a socket in a file; its processes have a mark. `within` runs its command."""

    def __init__(
        self, model: Path, folder: Path, *flags: str, env: Mapping[str, str] | None = None, within: tuple[str, ...] = ()
    ) -> None:
        self._socket, self._mark = folder / "http.sock", uuid.uuid4().hex
        self._flags = [str(model), *FLAGS, *flags]
        self._env, self._within = {**(env or {}), "NODE_MARK": self._mark}, within
        self._server: ServerProcess | None = None

    @property
    def server(self) -> ServerProcess:
        """The server, which has been started."""
        assert self._server is not None
        return self._server

    def start_server(self) -> None:
        self._socket.unlink(missing_ok=True)
        self._server = ServerProcess(*self._flags, "--uds", str(self._socket), env=self._env, command=self._within)

    def start(self) -> None:
        """Start all processes."""
        self.start_server()

    @abstractmethod
    def complete(self) -> None:
        """Let a run go on that waits for what is not there yet."""

    def client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.HTTPTransport(uds=str(self._socket)), base_url="http://node", timeout=120)

    def token_ids(self) -> list[int]:
        body = PROMPT | {"max_tokens": 8, "return_token_ids": True}
        with self.client() as client:
            return client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]

    def is_healthy(self) -> bool:
        with self.client() as client:
            return client.get("/health").status_code == 200

    def num_running(self) -> int:
        """Return the number of requests that run, of the metrics."""
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
        return next(int(float(line.split()[-1])) for line in lines if line.startswith("vllm:num_requests_running{"))

    def pid(self, process: str) -> int | None:
        """Return a process, None while it has not been started: the server, its engine, or another one of the run."""
        if process == "server":
            return self.server.pid
        assert process == "engine", process
        return next(iter(engine_pids(self.server)), None)

    def pids(self) -> list[int]:
        """Return all processes that run."""
        return marked_pids(self._mark)

    def close(self) -> None:
        for pid in marked_pids(self._mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._server is not None:
            self._server.close()


class Asking(threading.Thread):
    """A request that runs while a process is killed: its events so far, and whether it was answered to the end."""

    def __init__(self, run: Run, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._run, self._body = run, PROMPT | body | {"stream": True}
        self.num_events, self.has_all = 0, False
        self._has_failed = False
        self.start()

    def run(self) -> None:
        with (
            suppress(httpx.HTTPError), self._run.client() as client,
            client.stream("POST", "/v1/completions", json=self._body) as response,
        ):  # fmt: skip
            for line in response.iter_lines():
                self._has_failed |= line.startswith('data: {"error"')
                self.has_all |= line == "data: [DONE]" and not self._has_failed
                self.num_events += line.startswith("data: {")

    def wait_ended(self) -> None:
        """Wait for the end of the request, whatever it is."""
        self.join(120)
        assert not self.is_alive(), "a request without an end"


def reach(run: Run, phase: str) -> Asking | None:
    """Start a run and bring it to a phase from `loading` on; return the request that runs in it."""
    run.start()
    if phase == "loading":
        wait_until(lambda: (pid := run.pid("member")) is not None and _has_torch(pid))  # it has joined
        return None
    run.server.wait_ready()
    if phase == "idle":
        return None
    if phase == "prefill":
        return ask_until_it_runs(run)
    asking = Asking(run, {"max_tokens": 400})
    wait_until(lambda: asking.num_events > 1)
    if phase == "leaving":
        run.server.signal(signal.SIGTERM)
    return asking


def ask_until_it_runs(run: Run) -> Asking:
    """Return a request with a long prompt that is being computed. One that has ended before the look is asked again."""
    asking = Asking(run, LONG | {"max_tokens": 8})

    def runs() -> bool:
        nonlocal asking
        if not asking.is_alive():
            asking = Asking(run, LONG | {"max_tokens": 8})
        return run.num_running() == 1

    wait_until(runs)
    return asking


def _has_torch(pid: int) -> bool:
    with suppress(OSError):
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    return False


def check_end(run: Run, pid: int, fault: str, asking: Asking | None) -> None:
    """Kill or stop a process; the run and its request end."""
    os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    wait_until(lambda: not run.pids())
    if asking is not None:
        asking.wait_ended()


def check_goes_on(run: Run, pid: int, phase: str, asking: Asking | None, *, waits: bool = False) -> None:
    """Stop a process that supervises for longer than the limit of those that compute, continue it, and end the run.

    `waits`: the run is not complete yet.
    """
    before = set(run.pids())
    os.kill(pid, signal.SIGSTOP)
    time.sleep(STALL_LIMIT_S + 2)
    assert waits or phase == "leaving" or before <= set(run.pids()), "the run has ended"
    with suppress(ProcessLookupError):  # what leaves may end a process that is stopped
        os.kill(pid, signal.SIGCONT)
    if waits:
        run.complete()
    if waits or phase == "loading":
        run.server.wait_ready()
    if asking is not None:
        asking.wait_ended()
        assert asking.has_all, "a request that was not answered"
    if phase != "leaving":
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
