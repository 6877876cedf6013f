"""Queue ordering and preemption-victim policies, small and replaceable.

A policy gives each request its queue key, chooses the next request to admit, and orders the running ones. `ByPriority`
is the default and the interface; `FirstComeFirstServed` and `FairShare` (`client_shares`, a room) replace parts of it.
"""

from bisect import bisect_right
from collections.abc import Iterable

from quire.core.sequence import QueueKey, Request, Sequence

AGEING_STEPS = 1024  # what one level of priority is worth: half a minute to a few, where a step takes 30 to 200 ms


class SkippedRequests:
    """Waiting requests that one step does not admit, although it may admit later ones."""

    def __init__(self) -> None:
        self.requests: set[Request] = set()
        self.clients: set[str] = set()      # all requests of these, further ones included
        self.last: Request | None = None    # in order

    def add(self, request: Request) -> None:
        """Skip one request."""
        self.requests.add(request)
        self.last = request

    def add_client(self, client_id: str) -> None:
        """Skip all waiting requests of a client."""
        self.clients.add(client_id)

    def __contains__(self, request: Request) -> bool:
        """Return whether a request is skipped."""
        return request in self.requests or request.client_id in self.clients


class ByPriority:
    """Admit the lower priority first, equal ones in order of arrival; preempt in the opposite order.

    The queue key of a request is fixed at arrival: that of a request of priority 0 that arrived AGEING_STEPS later for
    each level. So waiting requests age: none is overtaken by one that arrives so many steps later, and the first in
    order stays the first until then. With one priority for all this is FCFS (Kwon et al. 2023, section 4.5).
    """

    def __init__(self) -> None:
        self._num_steps = 0

    def count_step(self) -> None:
        """Count a step: the only clock that there is."""
        self._num_steps += 1

    def queue_key(self, request: Request, number: int) -> QueueKey:
        """Return the queue key of a new arrival; `number` is higher than those of all earlier arrivals."""
        return self._num_steps + AGEING_STEPS * request.priority, number

    def add(self, request: Request) -> None:
        """Note a new request, which has its queue key and is about to be queued."""

    def enqueue(self, request: Request) -> None:
        """Note that a request waits: a new one, or one that is preempted, or not held any more."""

    def dequeue(self, request: Request) -> None:
        """Note that a request waits no more: it is about to be admitted or held, or has ended."""

    def admit(self, request: Request) -> QueueKey:
        """Note that a request is admitted, for the first time or again. Return its queue key from now on."""
        return request.queue_key

    def finish(self, request: Request) -> None:
        """Note that a request has ended."""

    def charge_prompt(self, request: Request) -> None:
        """Note how much of a prompt is computed: the request has just been admitted for the first time."""

    def charge_outputs(self, sampled: Iterable[tuple[Request, Sequence]]) -> None:
        """Note the tokens that a step has sampled, by request."""

    def next_to_admit(
        self, waiting: list[Request], swapped: list[Request], skipped: SkippedRequests | None = None
    ) -> Request | None:
        """Return the next request to admit that is not skipped; None if there is none. Both lists are by queue key.

        While anything is swapped out nothing new is admitted: of the waiting requests only a preempted one before it.
        """
        first = 0
        if skipped is not None and skipped.last is not None:
            first = bisect_right(waiting, skipped.last.queue_key, key=queue_key_of)
        for index in range(first, len(waiting)):
            request = waiting[index]
            if swapped and request.queue_key > swapped[0].queue_key:
                break
            if swapped and not request.num_preemptions:
                continue
            if skipped is None or request.client_id not in skipped.clients:
                return request
            skipped.last = request                                       # it is looked at once per step
        return swapped[0] if swapped else None

    def planning_order(self, running: list[Request]) -> list[Request]:
        """Return the running requests, given by queue key, in the order of planning: the last one is preempted first.

        The first by queue key stays the first, so it is never preempted, and all admitted requests finish.
        """
        return running.copy()


class FirstComeFirstServed(ByPriority):
    """Admit requests in order of arrival, whatever their priority."""

    def queue_key(self, request: Request, number: int) -> QueueKey:
        """Return the queue key of a new arrival."""
        return 0, number


def queue_key_of(request: Request) -> QueueKey:
    """Return a request's queue key."""
    return request.queue_key
