"""Lines of waiting requests by what they lack, read in one order at a bounded cost; orders and preemption victims.

A request waits in a line of new requests until a step finds that it cannot admit it for something that other steps do
not change: its grammar is being compiled, its adapter is not there, its client has its share of the blocks. Then it
waits in the line of those that lack the same, where later steps look at the first few, and at no more once one answers
for all. So thousands of them cost a step no more than some, and those that lack nothing are found at once. Preempted
requests have a line of their own: they are few, and come before swapped ones.

A policy gives the order: a rank for each request, the lower first, and lines that are sorted by it. No request passes
another one of its line, nor one of another line that a step has looked at and could admit.

A policy gives each request its queue key, ranks the waiting ones, and orders the running ones. `ByPriority` is the
default and the interface; `FirstComeFirstServed` and `FairShare` (`quire.scheduling.fair_share`) replace parts of it.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from typing import Any, NamedTuple

from quire.core.deltas import WaitReason
from quire.core.sequence import QueueKey, Request, Sequence

MAX_LOOKS = 32  # looks of a step at the front of a line of requests that lack something, which is prepared first

Rank = tuple[Any, ...]  # sort key of waiting requests: the lower is admitted first


class Lack(NamedTuple):
    """Resource that a waiting request lacks. `is_for_all`: later requests that may need it lack it in this step."""

    reason: WaitReason
    is_for_all: bool = False


class WaitingLine(ABC):
    """Waiting requests in the order of a policy, and how far the step under way has read."""

    @abstractmethod
    def __len__(self) -> int:
        """Count the requests."""

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in any order."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Insert a request at its place in the order of the line."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Remove a queued request, at any place."""

    @abstractmethod
    def first(self) -> Request | None:
        """Return the first request; None if there is none."""

    @abstractmethod
    def next(self) -> Request | None:
        """Return the first request that was not passed over since `rewind`; None if there is none."""

    @abstractmethod
    def pass_over(self, request: Request) -> None:
        """Pass over the request that `next` has returned, or one that was added behind it."""

    @abstractmethod
    def rewind(self) -> None:
        """Read from the front again."""


class KeyedLine(WaitingLine):
    """A line by queue key."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._passed: QueueKey | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Insert a request by its queue key."""
        insort(self._requests, request, key=queue_key_of)

    def remove(self, request: Request) -> None:
        """Remove a queued request, found by bisection of the keys."""
        del self._requests[bisect_left(self._requests, request.queue_key, key=queue_key_of)]

    def first(self) -> Request | None:
        """Return the first request; None if there is none."""
        return self._requests[0] if self._requests else None

    def next(self) -> Request | None:
        """Return the first request behind those passed over; None if there is none."""
        if self._passed is None:
            return self.first()
        index = bisect_right(self._requests, self._passed, key=queue_key_of)
        return self._requests[index] if index < len(self._requests) else None

    def pass_over(self, request: Request) -> None:
        """Pass over a request, and all before it."""
        self._passed = request.queue_key

    def rewind(self) -> None:
        """Read from the front again."""
        self._passed = None


LineName = tuple[WaitReason | None, str]  # what is lacking, and of which client, where clients differ in it
_NEW: LineName = (None, "new")
_PREEMPTED: LineName = (None, "preempted")


class WaitingLines:
    """All waiting requests, each in one line. `rank` and `make_line` are of a policy."""

    def __init__(self, rank: Callable[[Request], Rank], make_line: Callable[[], WaitingLine]) -> None:
        self.rank, self._make_line = rank, make_line
        self._lines: dict[LineName, WaitingLine] = {_NEW: make_line(), _PREEMPTED: KeyedLine()}
        self._names: dict[Request, LineName] = {}

    def __contains__(self, request: Request) -> bool:
        """Return whether a request waits."""
        return request in self._names

    @property
    def num_lacking(self) -> int:
        """Requests in the lines of those that lack something."""
        return len(self._names) - len(self._lines[_NEW]) - len(self._lines[_PREEMPTED])

    def add(self, request: Request) -> None:
        """Add a request, of which nothing is known yet."""
        self._add(request, _PREEMPTED if request.num_preemptions else _NEW)

    def remove(self, request: Request) -> None:
        """Remove a request that is admitted or held, or has ended."""
        name = self._names.pop(request)
        line = self._lines[name]
        line.remove(request)
        if name[0] is not None and not len(line):
            del self._lines[name]

    def lack_of(self, request: Request) -> WaitReason | None:
        """Return what a waiting request was found to lack."""
        return self._names[request][0]

    def move(self, request: Request, name: LineName) -> WaitingLine:
        """Move a new request, or one that lacks something, to the line of a lack; return it."""
        self.remove(request)
        return self._add(request, name)

    def line_of(self, request: Request) -> tuple[LineName, WaitingLine]:
        """Return the line of a waiting request, with its name."""
        name = self._names[request]
        return name, self._lines[name]

    def _add(self, request: Request, name: LineName) -> WaitingLine:
        self._names[request] = name
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = self._make_line()
        line.add(request)
        return line

    def first(self) -> Request | None:
        """Return the first waiting request, whatever it lacks."""
        firsts = [request for line in self._lines.values() if (request := line.first()) is not None]
        return min(firsts, key=self.rank, default=None)

    @property
    def preempted(self) -> WaitingLine:
        """The line of preempted requests."""
        return self._lines[_PREEMPTED]

    @property
    def new(self) -> WaitingLine:
        """The line of new requests, of which no step has found that they lack anything."""
        return self._lines[_NEW]

    def items(self) -> Iterator[tuple[LineName, WaitingLine]]:
        """Yield all lines with their names."""
        yield from self._lines.items()

    def check(self, waiting: list[Request]) -> None:
        """Assert that exactly these requests wait, each in one line, and that no line is being read."""
        assert self._names.keys() == set(waiting), "requests are lost or doubled"
        assert sum(len(line) for line in self._lines.values()) == len(waiting)
        for line in self._lines.values():
            assert line.first() is line.next(), "a line is being read"
        new = [request for request in waiting if self._names[request] != _PREEMPTED]
        assert not any(request.num_preemptions for request in new)


class LineReader:
    """The waiting requests that one step looks at, in the order of the policy. `close` it."""

    def __init__(self, lines: WaitingLines) -> None:
        self._lines, self._looks = lines, dict[LineName, int]()
        self._read: dict[LineName, WaitingLine] = dict(lines.items())
        self._heads: list[tuple[Rank, int, LineName]] = []   # fronts of lines; ranks may be too low: see `next`
        for number, (name, line) in enumerate(self._read.items()):
            if (request := line.next()) is not None:
                self._heads.append((lines.rank(request), number, name))
        heapify(self._heads)

    def next(self) -> Request | None:
        """Return the first request, over all lines, that this step has not passed over; None if there is none.

        Ranks only grow within a step, so that of a head is put right when it comes to the top.
        """
        while self._heads:
            _, number, name = self._heads[0]
            request = self._read[name].next()
            if request is None or self._looks.get(name, 0) >= MAX_LOOKS:
                heappop(self._heads)
                continue
            head = self._lines.rank(request), number, name
            if head == self._heads[0]:
                return request
            heapreplace(self._heads, head)
        return None

    def next_preempted(self) -> Request | None:
        """Return the first preempted request that this step has not passed over; None if there is none."""
        return self._lines.preempted.next()

    def pass_over(self, request: Request) -> None:
        """Pass over a request for this step alone."""
        self._lines.line_of(request)[1].pass_over(request)

    def set_aside(self, request: Request, lack: Lack) -> bool:
        """Pass over a request that lacks something; return whether it waits in another line from now on.

        A preempted one stays where it is.
        """
        name, line = self._lines.line_of(request)
        lacking: LineName = lack.reason, request.client_id if lack.reason == "kv_share" else ""
        moves = name not in (_PREEMPTED, lacking)
        if moves:
            line = self._read[lacking] = self._lines.move(request, lacking)
        line.pass_over(request)
        if lack.is_for_all:
            self._looks[lacking] = MAX_LOOKS
        elif name == lacking:
            self._looks[lacking] = self._looks.get(lacking, 0) + 1
        return moves

    def has_ended(self, reason: WaitReason, client_id: str = "") -> bool:
        """Return whether one look in this step has answered for all that may lack the same."""
        return self._looks.get((reason, client_id), 0) >= MAX_LOOKS

    def close(self) -> None:
        """End the step's reading."""
        for line in self._read.values():
            line.rewind()


def queue_key_of(request: Request) -> QueueKey:
    """Return a request's queue key."""
    return request.queue_key


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
