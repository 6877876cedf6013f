"""Launcher of child processes: the engine, and the template worker.

A child inherits one end of a socket pair and nothing else: no port, no file. When the parent's end closes, because it
was closed or because the parent has died, the child ends by itself.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from quire.core.errors import ConfigError
from quire.core.frames import frame
from quire.engine.messages import Start
from quire.engine.options import EngineOptions

# Iterations of about 50 ns for which a thread of the engine spins at a barrier before it sleeps. libgomp's default of
# 300,000 keeps a core busy that the server or another process needs: beside another server bursts of 32 streams made
# 45, 61, 66 and 203 tokens per second with it, 122 and 153 with this.
SPINS = {"GOMP_SPINCOUNT": "10000"}
STOP_TIMEOUT_S = 3.0  # after its socket was closed; usually milliseconds
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A running engine process, and the parent's end of the socket pair."""

    process: subprocess.Popen[bytes]
    connection: socket.socket

    @classmethod
    def spawn(cls, options: EngineOptions) -> "EngineProcess":
        """Start the engine process, which begins to load. ConfigError if a setting cannot be encoded."""
        try:
            start = frame(Start(options))
        except (OverflowError, UnicodeEncodeError) as error:
            raise ConfigError(f"a setting is an integer of more than 64 bits or no valid Unicode: {error}") from error
        environment = os.environ if "OMP_WAIT_POLICY" in os.environ else SPINS | os.environ
        process, ours = start_module("quire.engine.process", env=environment)
        with suppress(ConnectionError):  # it has died: the reader of its reports finds out
            ours.sendall(start)
        return cls(process, ours)

    def stop(self) -> int:
        """Close the socket and wait for the process, or kill it; return its exit status. Blocks. Idempotent."""
        self.connection.close()
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def start_module(
    module: str,
    *,
    stdout: int | None = None,
    env: Mapping[str, str] | None = None,
    interpreter: str = sys.executable,
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a module of this package with its socket's number as the only argument; return the process and our socket.

    `start` is called as `subprocess.Popen`. Raises OSError if the interpreter cannot be started.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs, block_stop_signals():
            command = [interpreter, "-P", "-m", module, str(theirs.fileno())]
            process = start(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=stdout, env=env)
    except BaseException:
        ours.close()
        raise
    return process, ours


@contextmanager
def block_stop_signals() -> Iterator[None]:
    """Block SIGINT and SIGTERM in this thread.

    Terminals and service managers send them to all processes of a group. A child inherits the mask, which holds from
    its first instruction on, before its Python could ignore a signal. The parent receives its signals afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
