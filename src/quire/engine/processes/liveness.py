"""Liveness of an engine process: heartbeats during steps, and the watches of its client at start and in steps.

The duration of a start depends on a download, the weights and the compilation of kernels, so no bound on the whole
fits. Meanwhile the process uses CPU time, reads from disk or maps files. The system counts these per process, so the
watch needs no cooperation of the engine, which may hang anywhere.

Later a client looks at intervals, and asks an idle engine for a sign. Looks are counted, not time: a client that was
itself stopped, or had a busy event loop, has missed looks, and no look counts before it has read what the engine
has sent meanwhile. So an engine is never ended for its client's pause.

The model reports progress after each layer, and a layer of a long prompt may take longer than the server's stall limit.
Its work is known from the plan, so its time is estimated: by the rate of the layers before, or, while none has been
measured, by a rate that every CPU reaches. A layer that takes LATE_FACTOR times the estimate is late.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from quire.core.plan import StepPlan
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


HEARTBEAT_INTERVAL_S = 0.25


class Heartbeat:
    """A thread that reports, while the engine works, that the model advances or that its layer is not late yet.

    It sends nothing when a step makes no progress, and its thread sleeps while no step runs. `progress` counts layers;
    `is_on_time` takes the count and decides (see `StallDetector`). By default progress since the last look
    decides alone.
    """

    def __init__(
        self, progress: Callable[[], int], beat: Callable[[], None], is_on_time: Callable[[int], bool] | None = None
    ) -> None:
        self._progress, self._beat = progress, beat
        self._is_on_time = is_on_time or self._has_advanced
        self._last = progress()
        self._is_working = threading.Event()
        self._is_over = False

    def start(self) -> None:
        """Start the thread; it ends with `stop`, or with the process."""
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def resume(self) -> None:
        """Start to send heartbeats: a step begins."""
        self._is_working.set()

    def pause(self) -> None:
        """Stop sending heartbeats: the engine is idle."""
        self._is_working.clear()

    def stop(self) -> None:
        """End the thread, which sends nothing any more."""
        self._is_over = True
        self._is_working.set()

    def _run(self) -> None:
        while self._is_working.wait() and not self._is_over:
            time.sleep(HEARTBEAT_INTERVAL_S)
            if not self._is_over and self._is_on_time(self._progress()):
                self._beat()

    def _has_advanced(self, num_layers: int) -> bool:
        last, self._last = self._last, num_layers
        return num_layers != last


LATE_FACTOR = 5.0
FLOOR_FLOPS_PER_S = 2e9     # rate of one thread, before one is measured; AVX2 reaches 20 times as much
MIN_MEASURED_S = 0.5        # shorter times do not predict long layers: the heartbeat polls four times a second


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Floating-point operations of one layer: for each token, and for each pair of a token and one in its context.

    `of_image`: those of a layer of the encoder of images, by an image's placeholders; None: there is none.
    """

    per_token: float
    per_pair: float
    of_image: Callable[[int], float] | None = None

    def of(self, plan: StepPlan) -> float:
        """Return the operations of one layer for a step, of its largest image if those are more."""
        num_pairs = sum(count * (start + count) for start, count in zip(plan.starts, plan.counts, strict=True))
        work = self.per_token * sum(plan.counts) + self.per_pair * num_pairs
        if plan.encodings and self.of_image is not None:
            work = max(work, *(self.of_image(image.num_tokens) for image in plan.encodings))
        return work


class StallDetector:
    """Decision at each poll: the model has advanced, or its current layer is not late.

    `begin_step` is called by the thread that steps, `is_on_time` by the one that polls. `clock` returns seconds.
    """

    def __init__(self, cost: LayerCost, num_threads: int, clock: Callable[[], float]) -> None:
        self._cost, self._clock = cost, clock
        self._rate: float | None = None                     # operations per second, measured
        self._floor = FLOOR_FLOPS_PER_S * num_threads
        self._plan = StepPlan()
        self._num_layers, self._since_s = 0, clock()        # run so far, and when the last end was observed

    def begin_step(self, plan: StepPlan) -> None:
        """Begin a step with its first layer."""
        self._plan, self._since_s = plan, self._clock()

    def is_on_time(self, num_layers: int) -> bool:
        """Return whether layers have ended since the last poll, of `num_layers` run so far, or the next is not late."""
        now_s, work = self._clock(), self._cost.of(self._plan)
        num_new, passed_s = num_layers - self._num_layers, now_s - self._since_s
        if num_new > 0:
            if passed_s >= MIN_MEASURED_S and not self._plan.encodings:  # with images layers differ
                self._rate = num_new * work / passed_s
            self._num_layers, self._since_s = num_layers, now_s
            return True
        if self._rate is None:
            return passed_s <= work / self._floor
        return passed_s <= LATE_FACTOR * work / self._rate
