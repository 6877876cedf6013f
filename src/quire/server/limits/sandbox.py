"""Sandboxes: processes with limits that do the jobs of requests, one after the other, off the event loop.

A job past the limits kills its process; the next job gets a new one. The child's end is `sandbox_worker`.
"""

import asyncio
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from quire.core.frames import LENGTH_BYTES
from quire.engine.launcher import start_module
from quire.server.errors import shutting_down
from quire.server.limits.fair_semaphore import FairSemaphore
from quire.server.limits.sandbox_worker import MEMORY_LIMIT_BYTES, OUT_OF_MEMORY

START_LIMIT_S = 60.0        # it takes a seventh of a second
REPLY_SLACK = 30            # times the limit of a job, in wall time: for a process that is stopped, or ignores limits


class JobLimitError(Exception):
    """A job exceeded its time or its memory. The text says which: "within 2 seconds of CPU time"."""


class SandboxEndedError(RuntimeError):
    """A process ended in the middle of a job, which may not be the cause. `status` is that of `subprocess`."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class SandboxKind:
    """One kind of sandbox process."""

    name: str                   # errors say "the NAME process"
    module: str                 # run as `python -m MODULE FD`
    job_limit_s: float          # of CPU time
    max_reply_bytes: int


class SandboxLane:
    """One process at a time, and the semaphore for it, in which clients get slots in rotation.

    `start` makes the frame that a new process answers before its first job. Lives on one event loop; `close` it there.
    """

    def __init__(self, kind: SandboxKind, thread_name: str, start: Callable[[], bytes]) -> None:
        self.semaphore = FairSemaphore()
        self.process: SandboxProcess | None = None
        self._kind, self._start = kind, start
        self._thread = ThreadPoolExecutor(1, thread_name)
        self._is_closed = False

    def warm_up(self) -> None:
        """Start a process if there is none. Takes 1 to 2 ms."""
        if self.process is None and not self._is_closed:
            self.process = SandboxProcess(self._kind)

    async def ask(self, job: bytes) -> bytes:
        """Return the msgpack of the reply to a frame, of the current process, if it is alive, or of a new one.

        The caller holds a slot of the semaphore. JobLimitError when the job exceeds a limit; SandboxEndedError when the
        process was killed, crashed, or does not answer; ApiError 503 when closed. Cancelling the caller kills the job.
        """
        if self.process is not None and not self.process.is_alive:
            await self._stop_process()
        if self._is_closed:
            raise shutting_down()
        self.process = process = self.process or SandboxProcess(self._kind)
        was_ready, ask_in_thread = process.is_ready, asyncio.get_running_loop().run_in_executor
        try:
            if not process.is_ready:
                await ask_in_thread(self._thread, process.ask, self._start(), START_LIMIT_S)
                process.is_ready = True
            return await ask_in_thread(self._thread, process.ask, job, self._kind.job_limit_s * REPLY_SLACK)
        except (EOFError, OSError) as error:  # a timeout is an OSError
            status = await self._stop_process()
            if self._is_closed:
                raise shutting_down() from error
            if was_ready and isinstance(error, BrokenPipeError | ConnectionResetError):
                return await self.ask(job)  # an idle process was just ending, and has not read all of the job
            raise self._failure(status, is_ready=process.is_ready) from error
        except BaseException:  # cancelled: the reply is not needed
            await self._stop_process()
            raise

    async def close(self) -> None:
        """Kill the process, and start no other. Idempotent."""
        self._is_closed = True
        self._thread.shutdown(wait=False)
        await self._stop_process()

    async def _stop_process(self) -> int:
        """Kill the process, if there is one, and return its exit status."""
        process, self.process = self.process, None
        return 0 if process is None else await process.stop()

    def _failure(self, status: int, *, is_ready: bool) -> Exception:
        """Return the error of the job that a process died of."""
        if status == -signal.SIGPROF:
            return JobLimitError(f"within {self._kind.job_limit_s:g} seconds of CPU time")
        if status == OUT_OF_MEMORY:
            return JobLimitError(f"within {MEMORY_LIMIT_BYTES >> 20} MiB of memory")
        cause = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        what = "ended in the middle of a job" if is_ready else "did not start"
        return SandboxEndedError(f"the {self._kind.name} process {what} ({cause})", status)


class SandboxProcess:
    """A running sandbox process, and the server's end of the socket pair."""

    def __init__(self, kind: SandboxKind) -> None:
        self._process, self._socket = start_module(kind.module, stdout=subprocess.DEVNULL)
        self._replies = self._socket.makefile("rb")
        self._kind = kind
        self.is_ready = False       # has answered the start

    @property
    def is_alive(self) -> bool:
        """Return whether the process has not ended."""
        return self._process.poll() is None

    def ask(self, message: bytes, limit_s: float) -> bytes:
        """Send a frame and wait for the reply, in a thread. EOFError or OSError without a valid one."""
        self._socket.settimeout(limit_s)
        self._socket.sendall(message)
        length = int.from_bytes(self._replies.read(LENGTH_BYTES), "big")
        if not 0 < length <= self._kind.max_reply_bytes:
            raise EOFError(f"the {self._kind.name} process sent an invalid reply length: {length}")
        reply = self._replies.read(length)
        if len(reply) < length:
            raise EOFError(f"the {self._kind.name} process ended in the middle of a reply")
        return reply

    async def stop(self) -> int:
        """Kill the process and return its exit status; a concurrent `ask` raises EOFError."""
        self._process.kill()
        status = await asyncio.to_thread(self._process.wait)
        await asyncio.to_thread(self._replies.close)  # waits for a concurrent reader
        self._socket.close()
        return status
