"""Commands of nodes on this machine: a server over several of them, and what is left of it."""

import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from support.server import is_running

START = "from quire.cli.entry import main; main()"


def free_port(address: str = "127.0.0.1") -> int:
    with socket.socket() as found:
        found.bind((address, 0))
        return int(found.getsockname()[1])


def marked_pids(mark: str) -> list[int]:
    """Return the processes that run with this mark in their environment."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _has_mark(pid, mark)]


def _has_mark(pid: int, mark: str) -> bool:
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes() and is_running(pid)
    except OSError:
        return False


class NodeCommand:
    """`quire serve` as a node other than 0, whose processes can be told from all others of the machine.

    `first`: what its process runs before.
    """

    def __init__(
        self, *flags: str, within: Sequence[str] = (), env: Mapping[str, str] | None = None, cwd: Path | None = None,
        first: str = "",
    ) -> None:  # fmt: skip
        self.mark = uuid.uuid4().hex
        command = [*within, sys.executable, "-c", first + START, "serve", *flags]
        own = {**os.environ, **(env or {}), "NODE_MARK": self.mark}
        self.process = subprocess.Popen(
            command, env=own, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def pids(self) -> list[int]:
        """Return its processes that run, the command's own first."""
        return sorted(marked_pids(self.mark), key=lambda pid: pid != self.process.pid)

    def wait(self, timeout_s: float = 60.0) -> tuple[int, str]:
        """Wait for the end; return the status and the output."""
        output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output

    def close(self) -> None:
        """End what still runs."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Return the flags of `quire serve` for settings of `LLM`."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    return [word for flag, value in flags.items() for word in ([flag] if value is True else [flag, str(value)])]


@contextmanager
def node(
    *flags: str, within: Sequence[str] = (), env: Mapping[str, str] | None = None, cwd: Path | None = None,
    first: str = "",
) -> Iterator[NodeCommand]:  # fmt: skip
    """Run a node; it is killed at the end, if it still runs."""
    command = NodeCommand(*flags, within=within, env=env, cwd=cwd, first=first)
    try:
        yield command
    finally:
        command.close()
