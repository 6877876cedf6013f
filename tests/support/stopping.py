"""Processes that are held still, so that a test can look at what would otherwise be over at any moment."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from support.server import wait_until


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process with all of its threads; it goes on afterwards, if it still lives."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: _thread_states(pid) <= {"T", "Z"})  # a thread may go on until the others have been told
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def stopped_children(pid: int) -> Iterator[None]:
    """Stop the processes that a process has started, as an engine that a server has."""
    with ExitStack() as held:
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            held.enter_context(stopped(child))
        yield


def _thread_states(pid: int) -> set[str]:
    states = set()
    with suppress(FileNotFoundError):  # the process has just ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # it has just ended
                states.add((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return states
