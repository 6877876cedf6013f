"""Rate at which requests leave the queue, for the Retry-After of refused clients."""

import math
from collections import deque

RETRY_AFTER_S = 5  # where no estimate is known
WINDOW_S = 30      # older admissions do not count
LONGEST_S = 60     # upper bound: the estimate is rough


class AdmissionRate:
    """Admissions of the last WINDOW_S seconds, in one count per second."""

    def __init__(self) -> None:
        self._busy: set[int] = set()                 # engines that have admitted requests since they were last idle
        self._busy_since_s = 0.0
        self._by_second: deque[tuple[int, int]] = deque(maxlen=WINDOW_S)

    def record(self, num_requests: int, now_s: float, engine: int = 0) -> None:
        """Count requests that left the queue of an engine."""
        if not num_requests:
            return
        if not self._busy:
            self._busy_since_s = now_s
        self._busy.add(engine)
        second = int(now_s)
        if self._by_second and self._by_second[-1][0] == second:
            num_requests += self._by_second.pop()[1]
        self._by_second.append((second, num_requests))

    def rest(self, engine: int = 0) -> None:
        """Record that an engine is idle; once all are, start anew: a rate without requests says nothing."""
        self._busy.discard(engine)
        if not self._busy:
            self._by_second.clear()

    def seconds_to_admit(self, num_requests: int, now_s: float) -> int:
        """Return the whole seconds, 1 to LONGEST_S, until so many requests will have left at the current rate."""
        if not self._busy:
            return RETRY_AFTER_S
        num_recent = sum(num for second, num in self._by_second if second > now_s - WINDOW_S)
        if not num_recent:
            return LONGEST_S
        window_s = min(max(now_s - self._busy_since_s, 1.0), WINDOW_S)
        return min(max(math.ceil(num_requests * window_s / num_recent), 1), LONGEST_S)
