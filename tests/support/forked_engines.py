"""Processes of engines, ranks and servers, forked from one with their modules, for tests that look at what they do.

A new process spends nearly 2 CPU seconds on imports, a fork almost none; from then on both run the same code.
`EngineProcess.spawn` is for tests of the start itself. All forks of a test process have one parent, which ends with it.

The parent's protocol: a message with a module, its folder, environment and further arguments, and with descriptors (the
write end of a pipe for the exit status, stdout, stderr, and the module's own, its socket first) is answered with the
process id.
"""

import atexit
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from quire.core.frames import frame
from quire.engine.launcher import SPINS, EngineProcess, block_stop_signals
from quire.engine.messages import Start
from quire.engine.options import EngineOptions
from support import cpu_seconds

END = struct.Struct("<id")  # end of an engine: the exit status in the form of `Popen.returncode`, CPU seconds
MAX_MESSAGE_BYTES = 1 << 20
MAX_DESCRIPTORS = 8
# Loaded for all.
MODULES = ("quire.engine.processes.engine_process", "quire.engine.parallel.process", "quire.engine.parallel.rank")
NO_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # threads that a fork would lose
TESTS = Path(__file__).parents[1]


class ForkedProcess:
    """What is used of `Popen`, for a process that is not our child."""

    def __init__(self, pid: int, end: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._end = end  # the read end of a pipe
        self._reading = threading.Lock()  # several threads may wait

    def __del__(self) -> None:
        os.close(self._end)

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        if self.returncode is None and select.select([self._end], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status once there is one. TimeoutExpired after `timeout` seconds."""
        if not select.select([self._end], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(["a forked process"], timeout or 0)
        with self._reading:
            if self.returncode is None:
                self.returncode = self._status()
            return self.returncode

    def _status(self) -> int:
        status, seconds = END.unpack(os.read(self._end, END.size))
        cpu_seconds.REPORTED.append(seconds)
        return int(status)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended, and its parent has reaped it
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


class ForkedChild(ForkedProcess):
    """A fork of this process."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid, os.pidfd_open(pid))

    def _status(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Parent:
    """The process that forks, as the test process sees it."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
        environment = SPINS | os.environ | NO_THREADS | {"PYTHONPATH": path}
        self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs, block_stop_signals():
            command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # sys.stdout of a file would seek in what a fork has in its place
            )  # fmt: skip
        self._asking = threading.Lock()
        atexit.register(self.close)

    def fork(
        self,
        module: str,
        environment: Mapping[str, str],
        descriptors: Sequence[int],
        arguments: Sequence[str] = (),
        streams: tuple[int, int] = (1, 2),
    ) -> ForkedProcess:
        """Return a new process of a module. Its arguments are the numbers of its descriptors, and then those given.

        `streams`: its stdout and stderr.
        """
        ours, theirs = os.pipe()
        message = json.dumps([module, os.getcwd(), dict(environment), list(arguments)]).encode()
        with self._asking:
            socket.send_fds(self._socket, [message], [theirs, *streams, *descriptors])
            pid = int(self._socket.recv(MAX_MESSAGE_BYTES))
        os.close(theirs)
        return ForkedProcess(pid, ours)

    def close(self) -> None:
        """End the process."""
        with self._process:
            self._socket.close()


parent = cache(Parent)


def fork_module(
    module: str, *, env: Mapping[str, str], descriptors: Sequence[int] = ()
) -> tuple[ForkedProcess, socket.socket]:
    """Do what `start_module` does, by a fork with one thread."""
    ours, theirs = socket.socketpair()
    with theirs:
        return parent().fork(module, env, [theirs.fileno(), *descriptors]), ours


def fork_child(
    module: str, *, env: Mapping[str, str], descriptors: Sequence[int] = ()
) -> tuple[ForkedChild, socket.socket]:
    """Do what `start_module` does, by a fork of this process, which has imported what the module needs."""
    ours, theirs = socket.socketpair()
    with theirs, block_stop_signals():
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)  # the handler of an event loop with closed descriptors
            _run(module, os.getcwd(), dict(env), [], 1, 2, theirs.fileno(), *descriptors)
    return ForkedChild(pid), ours


def fork_engine(options: EngineOptions) -> EngineProcess:
    """Start an engine process, which begins to load, with one thread."""
    process, ours = fork_module("quire.engine.processes.engine_process", env=os.environ | {"OMP_NUM_THREADS": "1"})
    ours.sendall(frame(Start(options)))
    return EngineProcess(process, ours)


def main() -> None:
    """Fork processes until the test process has ended."""
    for module in MODULES:
        import_module(module)
    asked = socket.socket(fileno=int(sys.argv[1]))
    running: dict[int, tuple[int, int]] = {}  # keyed by descriptor of a process: its id, and the pipe for its end
    with selectors.DefaultSelector() as selector:
        selector.register(asked, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not asked:
                    selector.unregister(key.fd)
                    _report_end(key.fd, *running.pop(key.fd))
                    continue
                message, descriptors, *_ = socket.recv_fds(asked, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
                if not message:
                    return
                module, *settings = json.loads(message)
                import_module(module)  # what it needs is loaded once
                end, *others = descriptors
                if (pid := os.fork()) == 0:
                    os.close(end)
                    _run(module, *settings, *others)
                for each in others:
                    os.close(each)
                watched = os.pidfd_open(pid)
                running[watched] = pid, end
                selector.register(watched, selectors.EVENT_READ)
                asked.sendall(str(pid).encode())


def _report_end(watched: int, pid: int, end: int) -> None:
    _, status, usage = os.wait4(pid, 0)
    os.close(watched)
    os.write(end, END.pack(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime))
    os.close(end)


def _run(
    module: str, folder: str, environment: dict[str, str], arguments: list[str], out: int, err: int, *own: int
) -> NoReturn:
    """Be a process of the module, with the descriptors that a new one would have."""
    status = 1
    try:
        Path("/proc/self/comm").write_text(module)  # 15 characters are kept
        os.dup2(out, 1)
        os.dup2(err, 2)
        bounds = [2, *sorted(own), os.sysconf("SC_OPEN_MAX")]
        for below, above in pairwise(bounds):
            os.closerange(below + 1, above)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = [*map(str, own), *arguments]  # only for this process
        import_module(module).main()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
