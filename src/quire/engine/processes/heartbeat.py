"""Heartbeat of the engine during a step, which may take a minute for a long prefill; a detector of stalled layers.

The model reports progress after each layer, and a layer of a long prompt may take longer than the server's stall limit.
Its work is known from the plan, so its time is estimated: by the rate of the layers before, or, while none has been
measured, by a rate that every CPU reaches. A layer that takes LATE_FACTOR times the estimate is late.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.core.plan import StepPlan

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

    def start(self) -> None:
        """Start the thread; it ends with the process."""
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def resume(self) -> None:
        """Start to send heartbeats: a step begins."""
        self._is_working.set()

    def pause(self) -> None:
        """Stop sending heartbeats: the engine is idle."""
        self._is_working.clear()

    def _run(self) -> None:
        while self._is_working.wait():
            time.sleep(HEARTBEAT_INTERVAL_S)
            if self._is_on_time(self._progress()):
                self._beat()

    def _has_advanced(self, num_layers: int) -> bool:
        last, self._last = self._last, num_layers
        return num_layers != last


LATE_FACTOR = 5.0
FLOOR_FLOPS_PER_S = 2e9     # rate of one thread, before one is measured; AVX2 reaches 20 times as much
MIN_MEASURED_S = 0.5        # shorter times do not predict long layers: the heartbeat polls four times a second


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Floating-point operations of one layer: for each token, and for each pair of a token and one in its context."""

    per_token: float
    per_pair: float

    def of(self, plan: StepPlan) -> float:
        """Return the operations of one layer for a step."""
        num_pairs = sum(count * (start + count) for start, count in zip(plan.starts, plan.counts, strict=True))
        return self.per_token * sum(plan.counts) + self.per_pair * num_pairs


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
            if passed_s >= MIN_MEASURED_S:
                self._rate = num_new * work / passed_s
            self._num_layers, self._since_s = num_layers, now_s
            return True
        if self._rate is None:
            return passed_s <= work / self._floor
        return passed_s <= LATE_FACTOR * work / self._rate
