"""Heartbeat of the engine during a step, which may take a minute for a long prefill."""

import threading
import time
from collections.abc import Callable

HEARTBEAT_INTERVAL_S = 0.25


class Heartbeat:
    """A thread that reports, while the engine works, that the model advances or that its layer is not late yet.

    It sends nothing when a step makes no progress, and its thread sleeps while no step runs. `progress` counts layers;
    `is_on_time` takes the count and decides (see quire.engine.stall_detector). By default progress since the last look
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
