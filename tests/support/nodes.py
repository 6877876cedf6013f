"""Commands of nodes on this machine: a server over several of them, and what is left of it."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from quire.engine.parallel.node import PROCESS_MODULE
from support.forked_engines import ForkedProcess, parent
from support.server import is_running

START = "from quire.cli.entry import main; main()"
RANK_MODULE = "NODE_RANK_MODULE"
_TRIED_PORTS = count()


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port that is free, below those that the system chooses: until it is used, no other socket gets it."""
    while True:
        port = 10_000 + (61 * os.getpid() + next(_TRIED_PORTS)) % 20_000
        with socket.socket() as found, suppress(OSError):
            found.bind((address, port))
            return port


def marked_pids(mark: str) -> list[int]:
    """Return the processes that run with this mark in their environment."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _has_mark(pid, mark)]


def session_pids(session: int) -> list[int]:
    """Return the processes of a session that run."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _session_of(pid) == session]


def _session_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3]) if is_running(pid) else None
    except OSError:
        return None


def _has_mark(pid: int, mark: str) -> bool:
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes() and is_running(pid)
    except OSError:
        return False


class NodeCommand:
    """`quire serve` as a node other than 0, whose processes can be told from all others of the machine.

    A new process, which `within` runs; or with `is_forked` a fork with a session of its own (support/forked_node.py),
    whose ranks are processes of `rank_module`.
    """

    def __init__(
        self, *flags: str, within: Sequence[str] = (), env: Mapping[str, str] | None = None, cwd: Path | None = None,
        is_forked: bool = False, rank_module: str = PROCESS_MODULE,
    ) -> None:  # fmt: skip
        self._is_forked, self._mark = is_forked, uuid.uuid4().hex
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        own = {**os.environ, **(env or {}), "NODE_MARK": self._mark, RANK_MODULE: rank_module}
        self.process: subprocess.Popen[bytes] | ForkedProcess
        if is_forked:
            streams = self._output.fileno(), self._output.fileno()
            with chdir(cwd or Path.cwd()):
                self.process = parent().fork("support.forked_node", own, [], ["serve", *flags], streams)
            return
        command = [*within, sys.executable, "-c", START, "serve", *flags]
        self.process = subprocess.Popen(command, env=own, cwd=cwd, stdout=self._output, stderr=subprocess.STDOUT)

    def pids(self) -> list[int]:
        """Return its processes that run, the command's own first."""
        found = session_pids(self.process.pid) if self._is_forked else marked_pids(self._mark)
        return sorted(found, key=lambda pid: pid != self.process.pid)

    def wait(self, timeout_s: float = 120.0) -> tuple[int, str]:
        """Wait for the end; return the status and the output."""
        status = self.process.wait(timeout_s)
        self._output.seek(0)
        return status, self._output.read().decode()

    def close(self) -> None:
        """End what still runs."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self._output.close()


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Return the flags of `quire serve` for settings of `LLM`."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    return [word for flag, value in flags.items() for word in ([flag] if value is True else [flag, str(value)])]


@contextmanager
def running_node(*flags: str, **how: Any) -> Iterator[NodeCommand]:  # noqa: ANN401 (as in NodeCommand)
    """Run a node; it is killed at the end, if it still runs."""
    command = NodeCommand(*flags, **how)
    try:
        yield command
    finally:
        command.close()
