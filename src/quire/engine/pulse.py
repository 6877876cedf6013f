"""Signs of life in the middle of a long step: a first prefill may take a minute, and is no reason to worry."""

import threading
import time
from collections.abc import Callable

PULSE_S = 0.25


class Pulse:
    """A thread that says, while the engine works, that the model has come further since the last look.

    It says nothing when the work stands still, whatever the reason, and sleeps without waking while there is no work.
    """

    def __init__(self, progress: Callable[[], int], beat: Callable[[], None]) -> None:
        self._progress, self._beat = progress, beat
        self._is_working = threading.Event()

    def start(self) -> None:
        """Start the thread; it ends with the process."""
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def work(self) -> None:
        """Tell that there is work."""
        self._is_working.set()

    def rest(self) -> None:
        """Tell that there is none."""
        self._is_working.clear()

    def _run(self) -> None:
        last = self._progress()
        while self._is_working.wait():
            time.sleep(PULSE_S)
            now = self._progress()
            if now != last:
                self._beat()
            last = now
