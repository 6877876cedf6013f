"""Queue ordering and preemption-victim policies, small and replaceable.

A policy gives each request its queue key, ranks the waiting ones, and orders the running ones. `ByPriority` is the
default and the interface; `FirstComeFirstServed` and `FairShare` (`quire.scheduling.fair_share`) replace parts of it.
"""

from collections.abc import Iterable

from quire.core.sequence import QueueKey, Request, Sequence
from quire.scheduling.waiting_lines import KeyedLine, Rank, WaitingLine

AGEING_STEPS = 1024  # what one level of priority is worth: half a minute to a few, where a step takes 30 to 200 ms


class ByPriority:
    """Admit the lower priority first, equal ones in order of arrival; preempt in the opposite order.

    The queue key of a request is fixed at arrival: that of a request of priority 0 that arrived AGEING_STEPS later for
    each level. So waiting requests age: none is overtaken by one that arrives so many steps later, and the first in
    order stays the first until then. With one priority for all this is FCFS (Kwon et al. 2023, section 4.5).
    """

    orders_running = False      # whether `planning_order` and `charge_outputs` do anything

    def __init__(self) -> None:
        self.num_steps = 0      # counted by the scheduler: the only clock that there is

    def queue_key(self, request: Request, number: int) -> QueueKey:
        """Return the queue key of a new arrival; `number` is higher than those of all earlier arrivals."""
        return self.num_steps + AGEING_STEPS * request.priority, number

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

    def rank(self, request: Request) -> Rank:
        """Return the sort key of a waiting request among all that wait: the lower is admitted first."""
        return request.queue_key

    def make_line(self) -> WaitingLine:
        """Return an empty line of requests that wait and were never admitted, by their ranks."""
        return KeyedLine()

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
