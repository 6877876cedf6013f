"""Watches of an engine process by its client: at start, and for steps that make no progress.

The duration of a start depends on a download, the weights and the compilation of kernels, so no bound on the whole
fits. Meanwhile the process uses CPU time, reads from disk or maps files. The system counts these per process, so the
watch needs no cooperation of the engine, which may hang anywhere.

Later a client looks at intervals, and asks an idle engine for a sign. Looks are counted, not time: a client that was
itself stopped, or whose event loop was busy, has missed looks, and no look counts before it has read what the engine
has sent meanwhile. So an engine is never ended for its client's pause.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Literal, TypeVar

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


OnStall = Literal["ignore", "tell", "end"]
# The engine has work and makes no progress: nothing is done; idle engines are asked for signs, so that
# `stalled_s` is true of them, too; the engine is ended as well, like a dead one.

LOOKS_PER_LIMIT = 10


async def wait_for_stall(
    limit_s: float, num_signs: Callable[[], int], is_awaited: Callable[[], bool], ask: Callable[[], None],
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:  # fmt: skip
    """Return once a sign is awaited and LOOKS_PER_LIMIT intervals in succession have brought none.

    `num_signs`: of progress, since start. `is_awaited`: the engine has work, or was asked. `ask` is called after
    `limit_s` seconds in which none was; it makes the engine send a sign as soon as it can.
    """
    seen, num_late, num_idle = num_signs(), 0, 0
    while num_late <= LOOKS_PER_LIMIT:      # the work may have begun within the first interval
        await pause(limit_s / LOOKS_PER_LIMIT)
        has_sign, seen = num_signs() != seen, num_signs()
        num_late = num_late + 1 if is_awaited() and not has_sign else 0
        num_idle = 0 if is_awaited() else num_idle + 1
        if num_idle >= LOOKS_PER_LIMIT:
            num_idle = 0
            ask()


def stall_reason(limit_s: float) -> str:
    """Return why an engine was ended that made no progress."""
    return f"the engine has work and made no progress for {limit_s:g} s (stall_limit)"
