"""Fair queueing of clients by virtual token counters (Sheng et al. 2024, "Fairness in Serving Large Language Models").

A counter per client grows with the service that the client gets: INPUT_WEIGHT for each computed prompt token (cached
ones are free), OUTPUT_WEIGHT for each sampled token, divided by the client's own weight. The next request to admit is
the first one of the client with the least counter, so between two clients that both have waiting requests the service
differs by a constant, however unequal their loads (theorem 4.4 of the paper,
tests/scheduling/test_fair_share.py).

Two additions. A client that begins to wait is also lifted to the counter of the client that was admitted last: an
endless stream of new clients cannot keep a known one waiting. Counters of absent clients are kept for the latest
MAX_ABSENT of them only.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain, count, islice

from quire.core.sequence import QueueKey, Request, Sequence
from quire.scheduling.waiting_lines import ByPriority, Rank, WaitingLine, queue_key_of

INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2  # the paper's (section 5.1), after the prices of hosted models
MAX_ABSENT = 4096                   # clients without a request that keep their counters
MAX_SHOWN = 64                      # clients that a report of service names

_ADMITTED = -(1 << 62)  # admitted requests stand before all that never were: see `FairShare.admit`


class TokenCounters:
    """The virtual token counter of each client, its turn among equal counters, and how many requests it has here."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._lifted: dict[str, float] = {}     # what a counter was raised by: no service
        self._turns: dict[str, int] = {}
        self._num_here: dict[str, int] = {}
        self._absent: dict[str, None] = {}      # clients without a request, the longest absent first
        self._numbers = count()

    def __getitem__(self, client: str) -> float:
        """Return a client's counter; 0 for an unknown one."""
        return self._counters.get(client, 0.0)

    def __len__(self) -> int:
        """Count the clients that have a counter."""
        return len(self._counters)

    def place(self, client: str) -> tuple[float, int]:
        """Return a client's counter and its turn: the lower place comes first. Both only grow."""
        return self[client], self._turns.get(client, 0)

    def take_turn(self, client: str) -> None:
        """Place a client behind those with an equal counter."""
        self._turns[client] = next(self._numbers)

    def add_request(self, client: str) -> None:
        """Note a request of a client."""
        self._num_here[client] = self._num_here.get(client, 0) + 1
        self._absent.pop(client, None)
        self._counters.setdefault(client, 0.0)

    def end_request(self, client: str) -> None:
        """Note the end of a request; forget the longest absent client if there are too many."""
        self._num_here[client] -= 1
        if self._num_here[client]:
            return
        del self._num_here[client]
        self._absent[client] = None
        if len(self._absent) > MAX_ABSENT:
            oldest = next(iter(self._absent))
            del self._absent[oldest], self._counters[oldest]
            self._turns.pop(oldest, None)
            self._lifted.pop(oldest, None)

    def charge(self, request: Request, cost: int) -> None:
        """Add the cost of a request that is here to its client's counter."""
        client = request.client_id
        if client in self._num_here:
            self._counters[client] += cost / request.weight

    def lift(self, client: str, least: float) -> None:
        """Raise a client's counter to at least this."""
        if least > self._counters[client]:
            self._lifted[client] = self._lifted.get(client, 0.0) + least - self._counters[client]
            self._counters[client] = least

    def served(self) -> dict[str, float]:
        """Return what clients with requests here have been charged: at most MAX_SHOWN, those that came first."""
        return {
            client: self._counters[client] - self._lifted.get(client, 0.0)
            for client in islice(self._num_here, MAX_SHOWN)
        }


class ClientHeap:
    """A set of clients, of which the first by its place in the counters is found.

    Places only grow, so an entry of the heap may be too low and is put right when it comes to the top.
    """

    def __init__(self, counters: TokenCounters) -> None:
        self._counters = counters
        self._entries: dict[str, tuple[float, int, str]] = {}   # the valid entry of each client
        self._heap: list[tuple[float, int, str]] = []

    def add(self, client: str) -> None:
        """Add a client, if it is not there."""
        if client not in self._entries:
            entry = self._entries[client] = (*self._counters.place(client), client)
            heappush(self._heap, entry)
            if len(self._heap) > 2 * len(self._entries) + 64:
                self._heap = list(self._entries.values())
                heapify(self._heap)

    def discard(self, client: str) -> None:
        """Remove a client, if it is there."""
        self._entries.pop(client, None)

    def first(self) -> str | None:
        """Return the first client, None if there is none."""
        heap = self._heap
        while heap:
            entry = heap[0]
            client = entry[2]
            if self._entries.get(client) is not entry:
                heappop(heap)
                continue
            now = (*self._counters.place(client), client)
            if now == entry:
                return client
            self._entries[client] = now
            heapreplace(heap, now)
        return None


class ClientLine(WaitingLine):
    """A line by the places of clients in the counters, and by queue key within a client."""

    def __init__(self, counters: TokenCounters) -> None:
        self._queues: dict[str, list[Request]] = {}     # keyed by queue key
        self._passed: dict[str, QueueKey] = {}
        self._clients = ClientHeap(counters)
        self._read: dict[str, None] = {}    # clients of which all was passed over, taken from the heap until `rewind`
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self._queues.values())

    def add(self, request: Request) -> None:
        """Insert a request into its client's queue, by its queue key."""
        client = request.client_id
        self._num_requests += 1
        insort(self._queues.setdefault(client, []), request, key=queue_key_of)
        if client not in self._read:
            self._clients.add(client)

    def remove(self, request: Request) -> None:
        """Remove a queued request, and its client with the last one."""
        client = request.client_id
        queue = self._queues[client]
        self._num_requests -= 1
        del queue[bisect_left(queue, request.queue_key, key=queue_key_of)]
        if not queue:
            del self._queues[client]
            self._clients.discard(client)

    def first(self) -> Request | None:
        """Return the first request; None if there is none."""
        client = next(iter(self._read)) if self._read else self._clients.first()
        return None if client is None else self._queues[client][0]

    def next(self) -> Request | None:
        """Return the first request that was not passed over; None if there is none."""
        while (client := self._clients.first()) is not None:
            queue, passed = self._queues[client], self._passed.get(client)
            index = 0 if passed is None else bisect_right(queue, passed, key=queue_key_of)
            if index < len(queue):
                return queue[index]
            self._clients.discard(client)
            self._read[client] = None
        return None

    def pass_over(self, request: Request) -> None:
        """Pass over a request, and those of its client before it."""
        self._passed[request.client_id] = request.queue_key

    def rewind(self) -> None:
        """Read from the front again."""
        for client in self._read:
            if client in self._queues:
                self._clients.add(client)
        self._read.clear()
        self._passed.clear()


class FairShare(ByPriority):
    """Admit the first request of the client with the least counter; preempt the latest of the one with the largest.

    A client's own requests are in the order of `ByPriority`. An admitted request gets its queue key then, and keeps it:
    a preempted one comes back before any new one is admitted, so all admitted requests finish.
    """

    orders_running = True

    def __init__(self) -> None:
        super().__init__()
        self.counters = TokenCounters()
        self._num_new: dict[str, int] = {}      # requests that wait and were never admitted, by client
        self._competing = ClientHeap(self.counters)  # clients that have such requests
        self._num_admitted = 0
        self._last_admitted = ""    # the client

    def add(self, request: Request) -> None:
        """Note a new request; lift its client if none of its requests competes."""
        client = request.client_id
        self.counters.add_request(client)
        if client not in self._num_new:
            first = self._competing.first()
            least = 0.0 if first is None else self.counters[first]
            self.counters.lift(client, max(least, self.counters[self._last_admitted]))

    def enqueue(self, request: Request) -> None:
        """Let a request's client compete, unless the request was admitted before."""
        if not _was_admitted(request):
            client = request.client_id
            if client not in self._num_new:
                self.counters.take_turn(client)
                self._competing.add(client)
            self._num_new[client] = self._num_new.get(client, 0) + 1

    def dequeue(self, request: Request) -> None:
        """Remove a request from the competition."""
        if not _was_admitted(request):
            client = request.client_id
            self._num_new[client] -= 1
            self.counters.take_turn(client)
            if not self._num_new[client]:
                del self._num_new[client]
                self._competing.discard(client)

    def admit(self, request: Request) -> QueueKey:
        """Return a queue key behind all admitted requests, and before all new ones; an earlier one is kept."""
        if _was_admitted(request):
            return request.queue_key
        self._last_admitted = request.client_id
        self._num_admitted += 1
        return _ADMITTED, self._num_admitted

    def finish(self, request: Request) -> None:
        """Note that a request has ended, admitted or not."""
        self.counters.end_request(request.client_id)

    def served(self) -> dict[str, float]:
        """Return the service, by weight, of clients that wait or run: MAX_SHOWN at most."""
        return self.counters.served()

    def charge_prompt(self, request: Request) -> None:
        """Charge the prompt tokens that were not found in the cache."""
        self.counters.charge(request, INPUT_WEIGHT * (len(request.prompt_token_ids) - request.num_cached_tokens))

    def charge_outputs(self, sampled: Iterable[tuple[Request, Sequence]]) -> None:
        """Charge each sampled token."""
        for request, _ in sampled:
            self.counters.charge(request, OUTPUT_WEIGHT)

    def rank(self, request: Request) -> Rank:
        """Return the sort key of a waiting request: a preempted one by queue key, before the new ones by client."""
        place = (-1.0, 0) if _was_admitted(request) else self.counters.place(request.client_id)
        return *place, request.queue_key

    def make_line(self) -> WaitingLine:
        """Return an empty line of new requests."""
        return ClientLine(self.counters)

    def planning_order(self, running: list[Request]) -> list[Request]:
        """Return the first by queue key, then the rest by their clients' counters."""
        counters = self.counters
        return running[:1] + sorted(running[1:], key=lambda request: counters[request.client_id])


def _was_admitted(request: Request) -> bool:
    return request.queue_key[0] == _ADMITTED
