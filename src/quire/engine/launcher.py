"""Launcher of child processes: the engine, and the template worker.

A child inherits one end of a socket pair and nothing else: no port, no file. When the parent's end closes, because it
was closed or because the parent has died, the child ends by itself.
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import msgspec

from quire.core.errors import ConfigError
from quire.core.frames import frame
from quire.core.host_limits import num_threads
from quire.engine.options import EngineOptions

# Iterations of about 50 ns for which a thread of PyTorch on a CPU (models of transformers, the torch back end), that is
# libgomp's, spins at a barrier before it sleeps; our kernels have threads of their own. The default of 300,000 keeps a
# core busy that the server or another process needs: beside another server bursts of 32 streams made 45, 61, 66 and 203
# tokens per second with it, 122 and 153 with this.
SPINS = {"GOMP_SPINCOUNT": "10000"}
SECRET_BYTES = 32
STOP_TIMEOUT_S = 3.0  # after its socket was closed; usually milliseconds
LOOKS_PER_TIMEOUT = 30
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class FleetMember(msgspec.Struct, array_like=True, frozen=True):
    """An engine of several that move KV blocks among each other: its number, and the secret of all of them."""

    number: int
    secret: bytes


def member_name(number: int) -> str:
    """Return the name of an engine, by which the others know it."""
    return f"engine-{number}"


class Start(msgspec.Struct, tag="start", array_like=True, frozen=True):
    """The first message to an engine process: the options of the engine to load.

    `member`: with `prefill_engines`. Apart from `quire.engine.messages`, which needs NumPy: a server starts its engines
    before it loads that.
    """

    options: EngineOptions
    member: FleetMember | None = None


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A running engine process, and the parent's end of the socket pair. `secret`: of its fleet, which it may share."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    secret: bytes = field(default=b"", repr=False)

    @classmethod
    def spawn(cls, options: EngineOptions, number: int = 0, secret: bytes = b"") -> "EngineProcess":
        """Start the engine process, which begins to load. ConfigError if a setting cannot be encoded.

        `number`: of the engine, where `data_parallel_size` of them divide the threads of the machine. `secret`: the
        same for all of them, with `prefill_engines`.
        """
        try:
            start = frame(Start(options, FleetMember(number, secret) if options.prefill_engines else None))
        except (OverflowError, UnicodeEncodeError) as error:
            raise ConfigError(f"a setting is an integer of more than 64 bits or no valid Unicode: {error}") from error
        environment = spinning_environment()
        if options.data_parallel_size > 1:
            threads = {"OMP_NUM_THREADS": str(num_threads_of(number, options.data_parallel_size, environment))}
            environment = environment | threads
        process, ours = start_module("quire.engine.processes.engine_process", env=environment)
        with suppress(ConnectionError):  # it has died: the reader of its reports finds out
            ours.sendall(start)
        return cls(process, ours, secret)

    def kill(self) -> None:
        """End the process at once, also one that is stopped. Idempotent."""
        self.process.kill()

    def stop(self) -> int:
        """Close the socket and wait for the process, or kill it; return its exit status. Blocks. Idempotent."""
        self.connection.close()
        wait_or_kill([self.process])
        return self.process.wait()


def spawn_engines(options: EngineOptions) -> list[EngineProcess]:
    """Start `data_parallel_size` engine processes. Errors as in `EngineProcess.spawn`; none is left after one."""
    processes: list[EngineProcess] = []
    secret = secrets.token_bytes(SECRET_BYTES)
    try:
        processes.extend(EngineProcess.spawn(options, number, secret) for number in range(options.data_parallel_size))
    except BaseException:
        for process in processes:
            process.stop()
        raise
    return processes


def num_threads_of(number: int, num_engines: int, environment: Mapping[str, str]) -> int:
    """Return an engine's share of the threads: of OMP_NUM_THREADS, or of the CPUs of this process; at least 1."""
    total = num_threads(environment)
    return max(1, total // num_engines + (number < total % num_engines))


def spinning_environment() -> dict[str, str]:
    """Return the environment of a process that computes: with as many threads as there are CPUs for them."""
    threads = {"OMP_NUM_THREADS": str(num_threads())}  # PyTorch's OpenMP does not know of a container's quota
    return threads | ({} if "OMP_WAIT_POLICY" in os.environ else SPINS) | os.environ


def wait_or_kill(processes: Iterable[subprocess.Popen[bytes]], timeout_s: float | None = None) -> None:
    """Wait for processes that have been asked to end; kill those that do not within a time for all of them.

    `timeout_s`: None: STOP_TIMEOUT_S. It is counted in looks, as the machine may stop all processes for a while.
    """
    look_s, num_left = (STOP_TIMEOUT_S if timeout_s is None else timeout_s) / LOOKS_PER_TIMEOUT, LOOKS_PER_TIMEOUT
    for process in processes:
        while process.poll() is None and num_left:
            try:
                process.wait(look_s)
            except subprocess.TimeoutExpired:
                num_left -= 1
        if process.poll() is None:
            process.kill()
        process.wait()


def start_module(
    module: str,
    *,
    stdout: int | None = None,
    env: Mapping[str, str] | None = None,
    interpreter: str = sys.executable,
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
    descriptors: Sequence[int] = (),
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a module of this package; return the process and our socket.

    Its arguments are the number of its socket, and those of further descriptors that it inherits. `start` is called as
    `subprocess.Popen`. Raises OSError if the interpreter cannot be started.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs, block_stop_signals():
            numbers = [theirs.fileno(), *descriptors]
            command = [interpreter, "-P", "-m", module, *map(str, numbers)]
            process = start(command, pass_fds=numbers, stdin=subprocess.DEVNULL, stdout=stdout, env=env)
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
