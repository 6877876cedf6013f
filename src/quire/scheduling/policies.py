"""Who comes first, and who gives way: the policies of the scheduler as small replaceable classes."""

from collections import deque

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
