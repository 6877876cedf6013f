"""A real server in a process of its own, as `quire serve` starts it, on a port of the system's choice.

    with running_server("--max-num-seqs", "4") as server:
        server.get("/health")
"""

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import httpx

from support.forked_engines import ForkedProcess, parent

ENTRY = "from quire.cli.main import main; main()"
START_LIMIT_S = ANSWER_LIMIT_S = 120.0  # against hangs: no machine is that slow
END_LIMIT_S = 120.0
# Limits of servers, unless a test sets them: the machine may stop an engine, or the test that holds one, for as long as
# by default makes a server refuse requests or write comments into streams.
PATIENCE = {"serve": ("--stall-limit", "600", "--stream-keepalive", "600")}
READY_LINE = re.compile(r"^Quire is serving (?P<name>.+) on (?P<url>(?:https?://|unix:)\S+)$", re.MULTILINE)


class ServerProcess:
    """`quire serve`, or another `subcommand` that serves, and what it has printed. `url` is known once it is ready.

    A new process, of `entry`, code that `command` runs; or with `is_forked` a fork (support/forked_engines.py).
    """

    def __init__(
        self,
        *arguments: str,
        env: dict[str, str] | None = None,
        command: tuple[str, ...] = (),
        entry: str = ENTRY,
        is_forked: bool = False,
        subcommand: str = "serve",
    ) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close; a pipe without a reader would fill up)
        self.out = ""
        self.url = self.name = ""
        reader, writer = os.pipe()
        self.stdout = open(reader, "rb")  # noqa: SIM115 (closed by wait)
        environment = _environment() | (env or {})
        arguments = PATIENCE.get(subcommand, ()) + arguments
        self.process: subprocess.Popen[bytes] | ForkedProcess
        if is_forked:
            streams = writer, self._log.fileno()
            self.process = parent().fork("support.forked_server", environment, [], [subcommand, *arguments], streams)
        else:
            self.process = subprocess.Popen(
                [*command, sys.executable, "-c", entry, subcommand, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=self._log,
            )
        os.close(writer)

    @property
    def pid(self) -> int:
        """The server's process."""
        return self.process.pid

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    @property
    def log(self) -> str:
        """Everything on stderr so far."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def get(self, path: str) -> httpx.Response:
        """Ask, with patience."""
        return httpx.get(self.url + path, timeout=ANSWER_LIMIT_S)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Ask with a body, and with patience."""
        return httpx.post(self.url + path, json=body, timeout=ANSWER_LIMIT_S)

    def child_pids(self) -> list[int]:
        """The processes that the server has started and that are alive."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == self.pid]

    def engine_pid(self) -> int:
        """The engine's process."""
        (found,) = engine_pids(self)
        return found

    def wait_ready(self) -> None:
        """Wait for the ready line. Fails with what the server said if it ends before."""
        deadline_s = time.monotonic() + START_LIMIT_S
        while not (ready := READY_LINE.search(self.out)):
            remaining_s = deadline_s - time.monotonic()
            assert remaining_s > 0, f"not ready in {START_LIMIT_S} s: {self.out}{self.log}"
            if select.select([self.stdout], [], [], remaining_s)[0]:
                text = os.read(self.stdout.fileno(), 65536).decode()
                assert text, f"ended with {self.process.wait()} before it was ready: {self.out}{self.log}"
                self.out += text
        self.name, self.url = ready["name"], ready["url"]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float = END_LIMIT_S) -> int:
        """Wait for the end; return the exit status."""
        status = self.process.wait(timeout_s)
        if not self.stdout.closed:
            self.out += self.stdout.read().decode()
            self.stdout.close()
        return status

    def stop(self) -> int:
        """End the server as a service manager does; return the exit status."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait()

    def close(self) -> None:
        """Make sure that nothing is left, whatever has happened."""
        if self.process.poll() is None:
            children = self.child_pids()
            self.process.kill()
            for pid in children:
                _kill(pid)
        self.wait()
        self._log.close()


def engine_pids(server: ServerProcess) -> list[int]:
    """Return the processes of a server's engines, in order of their start."""
    return sorted(pid for pid in server.child_pids() if _is_engine(pid))


@contextmanager
def running_server(
    *arguments: str,
    env: dict[str, str] | None = None,
    command: tuple[str, ...] = (),
    entry: str = ENTRY,
    is_new: bool | None = None,
    subcommand: str = "serve",
) -> Iterator[ServerProcess]:
    """Start `quire serve --port 0`, or another `subcommand`, with more arguments; wait for it, and end it afterwards.

    It is a fork, unless it `is_new`: by default if it has a command or code of its own, or restarts its engine, as most
    tests of that look at what it does until the new one is ready, and a fork is ready at once.
    """
    if is_new is None:
        is_new = bool(command) or entry != ENTRY or "--restart-engine" in arguments
    server = ServerProcess(
        "--port", "0", *arguments, env=env, command=command, entry=entry, is_forked=not is_new, subcommand=subcommand
    )
    try:
        server.wait_ready()
        yield server
        if server.process.poll() is None:
            server.stop()
    finally:
        server.close()


def is_running(pid: int) -> bool:
    """Whether there is such a process, and not only its exit status."""
    return _state(pid) not in ("", "Z")


def is_stopped(pid: int) -> bool:
    """Whether a process has been stopped by a signal."""
    return _state(pid) == "T"


def wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Wait for a condition; fail when it does not come."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s in vain"
        time.sleep(0.01)


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    return kept | {"OMP_NUM_THREADS": "1"}


def _state(pid: int) -> str:
    """Return the letter of a process's state; an empty string without such a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) if is_running(pid) else None
    except OSError:
        return None


def _is_engine(pid: int) -> bool:
    """Return whether a process is an engine: by its command line, or, as a fork, by its name."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        name = Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return False
    return b"quire.engine.processes.engine_process" in command or name == "quire.engine.pr\n"


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
