"""Who comes first, and who gives way: the scheduler's policies, small and replaceable. A third is in recovery.py."""

from collections import deque
from collections.abc import Iterator

from quire.core.sequence import Request


class FirstComeFirstServed:
    """Serve in order of arrival, preempt in the opposite order (Kwon et al. 2023, section 4.5).

    A preempted request returns to its place. In most cases that is the front: only a request that waits for another to
    compute their common prefix is passed over, so that later ones run before it.
    """

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    def __contains__(self, request: Request) -> bool:
        """Whether a request waits here."""
        return request in self._queue

    def add(self, request: Request) -> None:
        """Queue a new arrival."""
        self._queue.append(request)

    def give_back(self, request: Request) -> None:
        """Queue a preempted request again."""
        place = 0
        while place < len(self._queue) and self._queue[place].arrival < request.arrival:
            place += 1
        self._queue.insert(place, request)

    def first(self, num_passed: int = 0) -> Request:
        """Return the request that must be served next, when so many before it are passed over."""
        return self._queue[num_passed]

    def remove(self, request: Request) -> None:
        """Take out a request that is served now, or that was aborted while it waited."""
        self._queue.remove(request)

    def victim(self, running: list[Request]) -> Request:
        """Choose whom to preempt: the latest arrival. `running` is in order of arrival and not empty."""
        return running[-1]


def next_to_enter(
    waiting: FirstComeFirstServed, swapped: FirstComeFirstServed, num_passed: int = 0
) -> Request | None:
    """Return who is to run next, when so many waiting requests are passed over; None if there is nobody.

    While anything is swapped out nothing new comes in: of those that wait, only who was preempted and arrived earlier.
    """
    first_waiting = waiting.first(num_passed) if num_passed < len(waiting) else None
    if len(swapped) == 0:
        return first_waiting
    first_swapped = swapped.first()
    if first_waiting is None or first_waiting.num_preemptions == 0 or first_waiting.arrival > first_swapped.arrival:
        return first_swapped
    return first_waiting
