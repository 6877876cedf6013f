"""The parent's side of an engine: started once, asked for one workload at a time, idle in between.

An `Adapter` is a child with the line protocol of adapters/protocol.py; a `Server` one that speaks OpenAI's HTTP.
"""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from quire_lab.bench.http_load import HttpLoad, ServerUnusableError, Target, first_model, open_session
from quire_lab.sim.statistics import Timeline
from quire_lab.sim.workloads import Schedule, WorkItem
from side_by_side.process_tree import cpu_s, end_group, peak_rss_bytes

LIMIT_S = 900.0  # a load's or a run's; a first load of vLLM compiles for minutes
POLL_S = 0.05
GRACE_S = 20.0   # to end by itself
LOG_LINES = 15


class EngineFailedError(Exception):
    """The engine ended, or did not answer in full, or in time. It is left out of what follows."""


class Answers(NamedTuple):
    """Answers to a burst."""

    timelines: list[Timeline]
    num_cached_tokens: int | None = None  # the prompts', found in a prefix cache; None: the engine does not tell


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Command that starts an engine. {port} in a server's command becomes a free one."""

    title: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)  # on top of this process's
    is_server: bool = False
    left_out: frozenset[str] = frozenset()                     # workloads that it is spared

    def start(self, log: Path) -> "Engine":
        """Start the engine and wait for its first token."""
        return (Server if self.is_server else Adapter)(self, log)


class Engine(ABC):
    """A running engine. `load_s` is the time from the start of its process to its first token."""

    def __init__(self, spec: EngineSpec, log: Path) -> None:
        self.title = spec.title
        self.facts: dict[str, Any] = {}
        self._spec = spec
        self._log = log
        started_s = time.perf_counter()
        self._process = self._launch()
        try:
            self._wait_for_first_token()
        except BaseException:
            self.stop()
            raise
        self.load_s = time.perf_counter() - started_s

    @abstractmethod
    def run(self, items: Sequence[WorkItem]) -> Answers:
        """Ask everything at once, wait for all of it. Raises EngineFailedError if not every token comes."""

    @abstractmethod
    def _launch(self) -> subprocess.Popen[str]: ...

    @abstractmethod
    def _wait_for_first_token(self) -> None: ...

    @property
    def pid(self) -> int:
        """The process that was started."""
        return self._process.pid

    @property
    def cpu_s(self) -> float:
        """CPU seconds used so far."""
        return cpu_s(self._process.pid)

    @property
    def peak_rss_bytes(self) -> int:
        """Most memory held so far."""
        return peak_rss_bytes(self._process.pid)

    def stop(self) -> None:
        """End the engine and all its processes; let it end by itself first."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        else:
            self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        end_group(self._process.pid, signal.SIGKILL)

    def _popen(self, command: Sequence[str], **streams: Any) -> subprocess.Popen[str]:  # noqa: ANN401
        """Start a group of its own in this session: it is ended whole, and hangs up with this terminal."""
        with self._log.open("a", encoding="utf-8") as log:
            return subprocess.Popen(
                command, env=os.environ | self._spec.environment, process_group=0, text=True,
                stdout=log, stderr=subprocess.STDOUT, **streams,
            )

    def _fail(self, what: str) -> EngineFailedError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        said = f"{self.title} {what} (exit status {self._process.poll()}). Its log ends:"
        return EngineFailedError("\n".join([said, *lines[-LOG_LINES:]]))


class Adapter(Engine):
    """An engine behind the line protocol, in process there."""

    def run(self, items: Sequence[WorkItem]) -> Answers:
        """See Engine."""
        assert self._process.stdin is not None
        requests = [[item.prompt_token_ids, item.output_len] for item in items]
        with suppress(BrokenPipeError):  # the answer will be missing
            self._process.stdin.write(json.dumps(requests) + "\n")
            self._process.stdin.flush()
        answer = self._answer()
        timelines = [Timeline(0.0, times_s) for times_s in answer["token_times_s"]]
        made = [len(timeline.token_times_s) for timeline in timelines]
        if made != [item.output_len for item in items]:
            raise self._fail(f"made {made} tokens")
        return Answers(timelines, answer["num_cached_tokens"])

    def _launch(self) -> subprocess.Popen[str]:
        answers, theirs = os.pipe()
        self._answers = os.fdopen(answers, encoding="utf-8")
        try:
            return self._popen([*self._spec.command, str(theirs)], stdin=subprocess.PIPE, pass_fds=[theirs])
        finally:
            os.close(theirs)

    def _wait_for_first_token(self) -> None:
        self.facts = self._answer()

    def _answer(self) -> Any:  # noqa: ANN401 (JSON)
        """Return the next line. A child that takes too long is killed, and so ends its answers."""
        limit = threading.Timer(LIMIT_S, end_group, (self._process.pid, signal.SIGKILL))
        limit.start()
        try:
            line = self._answers.readline()
        finally:
            limit.cancel()
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)  # until it has said why
            raise self._fail(f"ended, or took more than {LIMIT_S:g} s")
        return json.loads(line)


class Server(Engine):
    """An engine behind HTTP: the client's work is in its figures, and shares its cores."""

    def run(self, items: Sequence[WorkItem]) -> Answers:
        """See Engine."""
        return uvloop.run(self._burst(items))

    async def _burst(self, items: Sequence[WorkItem]) -> Answers:
        async with open_session(None) as session:
            target = Target(self.url, await first_model(session, self.url), LIMIT_S)
            run = await HttpLoad(session, target, items, Schedule([0.0] * len(items), len(items))).run()
        made = sum(request.num_output_tokens for request in run.requests)
        if run.failures or made != sum(item.output_len for item in items):
            raise self._fail(f"made {made} tokens, failures {run.failures[:3]}")
        return Answers(run.timelines)

    def _launch(self) -> subprocess.Popen[str]:
        port = str(_free_port())
        self.url = f"http://127.0.0.1:{port}"
        return self._popen([word.replace("{port}", port) for word in self._spec.command], stdin=subprocess.DEVNULL)

    def _wait_for_first_token(self) -> None:
        """Ask for a token until one comes: some servers name their models before they can run them."""
        deadline_s = time.perf_counter() + LIMIT_S
        while self._process.poll() is None and time.perf_counter() < deadline_s:
            with suppress(ServerUnusableError, EngineFailedError):
                self.run([WorkItem([1, 2, 3, 4], 1)])
                return
            time.sleep(POLL_S)
        raise self._fail(f"ended, or did not answer within {LIMIT_S:g} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
