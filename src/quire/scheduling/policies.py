"""Who comes first, and who gives way: the policies of the scheduler as small replaceable classes."""

from collections import deque

from quire.core.sequence import Request


class FirstComeFirstServed:
    """Serve in order of arrival, preempt in the opposite order (Kwon et al. 2023, section 4.5).

    A preempted request arrived before everything that still waits, so it returns to the front and the queue stays
    sorted.
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
        assert not self._queue or request.arrival < self._queue[0].arrival, "preempted out of order"
        self._queue.appendleft(request)

    def first(self) -> Request:
        """Return the request that must be served next."""
        return self._queue[0]

    def take(self) -> Request:
        """Remove and return the request that is served next."""
        return self._queue.popleft()

    def remove(self, request: Request) -> None:
        """Take out a request that was aborted while it waited."""
        self._queue.remove(request)

    def victim(self, running: list[Request]) -> Request:
        """Choose whom to preempt: the latest arrival. `running` is in order of arrival and not empty."""
        return running[-1]
