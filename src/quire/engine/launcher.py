"""Starts processes of ours, the engine's first of all, and makes sure that it ends.

A child holds one end of a socket pair and nothing else of ours: no port, no file. When our end closes, by intent or
because we die, it ends by itself.
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

# How long a thread of the engine spins for the others before it sleeps, in turns of about 50 ns. libgomp's own 300,000
# keep a core busy that the server, or whoever else is here, needs to let the other thread go on: beside another server
# bursts of 32 streams made 45, 61, 66 and 203 tokens per second with it, 122 and 153 with these.
SPINS = {"GOMP_SPINCOUNT": "10000"}
STOP_TIMEOUT_S = 3.0  # after its socket was closed; it takes milliseconds
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A running engine process, and our end of the socket pair."""

    process: subprocess.Popen[bytes]
    connection: socket.socket

    @classmethod
    def spawn(cls, options: EngineOptions) -> "EngineProcess":
        """Start the engine process; it begins to load at once. ConfigError if a setting cannot be sent to it."""
        try:
            start = frame(Start(options))
        except (OverflowError, UnicodeEncodeError) as error:
            raise ConfigError(f"a setting is an integer of more than 64 bits or no valid Unicode: {error}") from error
        environment = os.environ if "OMP_WAIT_POLICY" in os.environ else SPINS | os.environ
        process, ours = start_module("quire.engine.process", env=environment)
        with suppress(ConnectionError):  # it has died already: whoever waits for its answer finds out
            ours.sendall(start)
        return cls(process, ours)

    def stop(self) -> int:
        """Close our end and wait for the process, or kill it; return its exit status. Blocks. Twice is fine."""
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
    """Start a module of ours with the number of its socket as the only argument; return the process and our socket.

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
    """Block, in this thread, the signals that are for us to handle.

    A terminal and a service manager send them to all processes of a group. A child inherits what is blocked from its
    first instruction on, long before Python in it could ignore a signal; we get ours a moment later.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
