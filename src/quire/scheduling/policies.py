"""Who comes first, and who gives way: the scheduler's policies, small and replaceable. A third is in recovery.py."""

from itertools import islice

from quire.core.sequence import Request, Turn

AGEING_STEPS = 1024  # what one level of priority is worth: half a minute to a few, where a step takes 30 to 200 ms


class ByPriority:
    """Serve the lower priority first, equal ones in order of arrival; preempt in the opposite order.

    A request takes its place when it comes, for good: that of a request of priority 0 which came AGEING_STEPS later for
    each level. So those who wait age: nobody is overtaken by who comes so many steps after him, and the first in order
    stays the first until then. With one priority for all this is first come, first served (Kwon et al. 2023, 4.5).
    """

    def __init__(self) -> None:
        self._num_steps = 0

    def note_step(self) -> None:
        """Count a step: the only clock that there is."""
        self._num_steps += 1

    def turn(self, request: Request, number: int) -> Turn:
        """Return the place of a new arrival; `number` tells it from all others, and is higher than theirs."""
        return self._num_steps + AGEING_STEPS * request.priority, number

    def victim(self, running: list[Request]) -> Request:
        """Choose whom to preempt: the last in order. `running` is in order and not empty."""
        return running[-1]


def turn_of(request: Request) -> Turn:
    """Return a request's place in line."""
    return request.turn


def next_to_enter(waiting: list[Request], swapped: list[Request], num_passed: int = 0) -> Request | None:
    """Return who is to run next, when so many waiting requests are passed over; None if there is nobody.

    While anything is swapped out nothing new comes in: of those that wait, only who was preempted and is before it.
    """
    if not swapped:
        return waiting[num_passed] if num_passed < len(waiting) else None
    for request in islice(waiting, num_passed, None):
        if request.turn > swapped[0].turn:
            break
        if request.num_preemptions:
            return request
    return swapped[0]
