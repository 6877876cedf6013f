"""How fast requests leave the queue, for telling refused clients when to come back."""

import math
from collections import deque

from quire.server.errors import RETRY_AFTER_S

WINDOW_S = 30      # older admissions say little about now
LONGEST_S = 60     # clients give up rather than wait longer, and the estimate is rough


class AdmissionRate:
    """Admissions of the last half minute, counted per second so that their number does not matter."""

    def __init__(self) -> None:
        self._busy_since_s: float | None = None      # None: nothing was admitted since the engine last slept
        self._by_second: deque[tuple[int, int]] = deque(maxlen=WINDOW_S)

    def record(self, num_requests: int, now_s: float) -> None:
        """Take down that requests left the queue."""
        if not num_requests:
            return
        if self._busy_since_s is None:
            self._busy_since_s = now_s
        second = int(now_s)
        if self._by_second and self._by_second[-1][0] == second:
            num_requests += self._by_second.pop()[1]
        self._by_second.append((second, num_requests))

    def reset(self) -> None:
        """Begin anew: while nobody waits, nobody is admitted, which says nothing of how fast it can go."""
        self._busy_since_s = None
        self._by_second.clear()

    def seconds_to_admit(self, num_requests: int, now_s: float) -> int:
        """Return in how many whole seconds, 1 to LONGEST_S, that many will have left if it goes on as it went."""
        if self._busy_since_s is None:
            return RETRY_AFTER_S
        num_lately = sum(num for second, num in self._by_second if second > now_s - WINDOW_S)
        if not num_lately:
            return LONGEST_S
        lately_s = min(max(now_s - self._busy_since_s, 1.0), WINDOW_S)
        return min(max(math.ceil(num_requests * lately_s / num_lately), 1), LONGEST_S)
