"""Start timeout of the engine process: a process that neither computes nor reads for too long is given up.

The duration of a start depends on a download, the weights and the compilation of kernels, so no bound on the whole
fits. Meanwhile the process uses CPU time, reads from disk or maps files. The system counts these per process, so the
watch needs no cooperation of the engine, which may hang anywhere.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from quire.engine.messages import EngineDeadError

T = TypeVar("T")

POLLS_PER_TIMEOUT = 20

# Fields of /proc/PID/stat behind the command's name: major page faults, and CPU time, each own and of ended children.
_COUNTERS = slice(9, 15)


def activity_counters(pid: int) -> tuple[int, ...]:
    """Return counters that grow while a process computes, reads or maps; none where the system has no such counters."""
    counters: list[int] = []
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        counters += map(int, stat.rpartition(")")[2].split()[_COUNTERS])
        io = Path(f"/proc/{pid}/io").read_text(encoding="ascii")
        counters += (int(line.rpartition(" ")[2]) for line in io.splitlines())
    except (OSError, ValueError):
        pass  # the process has ended, or there is no /proc, or no /proc/PID/io: those read so far count
    return tuple(counters)


async def raise_when_inactive(
    counters: Callable[[], tuple[int, ...]], limit_s: float, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Poll counters until they have been the same for `limit_s` seconds; then raise EngineDeadError.

    Never returns. Polls every `limit_s` / POLLS_PER_TIMEOUT seconds. Never raises if there are no counters.
    """
    last, num_same = counters(), 0
    while num_same < POLLS_PER_TIMEOUT:
        await pause(limit_s / POLLS_PER_TIMEOUT)
        now = counters()
        num_same = num_same + 1 if now and now == last else 0
        last = now
    raise EngineDeadError(
        f"the engine process gave no sign of life for {limit_s:g} s while it started: it neither computed nor read "
        f"(start_timeout)"
    )


async def with_start_timeout(starting: Coroutine[Any, Any, T], pid: int, limit_s: float) -> T:
    """Return the result of `starting`, unless the process is inactive for `limit_s` seconds: then EngineDeadError."""
    start = asyncio.create_task(starting)
    watch = asyncio.create_task(raise_when_inactive(lambda: activity_counters(pid), limit_s))
    try:
        await asyncio.wait((start, watch), return_when=asyncio.FIRST_COMPLETED)
        if not start.done():
            watch.result()
        return await start
    finally:
        start.cancel()
        watch.cancel()
        await asyncio.wait((start, watch))
