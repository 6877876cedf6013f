"""Fair queueing of clients by virtual token counters (Sheng et al. 2024, "Fairness in Serving Large Language Models").

A counter per client grows with the service that the client gets: INPUT_WEIGHT for each computed prompt token (cached
ones are free), OUTPUT_WEIGHT for each sampled token, divided by the client's own weight. The next request to admit is
the first one of the client with the least counter, so between two clients that both have waiting requests the service
differs by a constant, however unequal their loads (theorem 4.4 of the paper,
tests/scheduling/client_shares/test_fair_share.py).

Two additions. A client that begins to wait is also lifted to the counter of the client that was admitted last: an
endless stream of new clients cannot keep a known one waiting. Counters of absent clients are kept for the latest
MAX_ABSENT of them only.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

from quire.core.sequence import QueueKey, Request, Sequence
from quire.scheduling.policies import ByPriority, SkippedRequests, queue_key_of

INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2  # the paper's (section 5.1), after the prices of hosted models
MAX_ABSENT = 4096                   # clients without a request that keep their counters

_ADMITTED = -(1 << 62)  # admitted requests stand before all that never were: see `FairShare.admit`


class TokenCounters:
    """The virtual token counter of each client, and how many requests each has here."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._num_here: dict[str, int] = {}
        self._absent: dict[str, None] = {}      # clients without a request, the longest absent first

    def __getitem__(self, client: str) -> float:
        """Return a client's counter; 0 for an unknown one."""
        return self._counters.get(client, 0.0)

    def __len__(self) -> int:
        """Count the clients that have a counter."""
        return len(self._counters)

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

    def charge(self, request: Request, cost: int) -> None:
        """Add the cost of a request that is here to its client's counter."""
        client = request.client_id
        if client in self._num_here:
            self._counters[client] += cost / request.weight

    def lift(self, client: str, least: float) -> None:
        """Raise a client's counter to at least this."""
        self._counters[client] = max(self._counters[client], least)


class Backlog:
    """Requests that were never admitted, by client; the client with the least counter comes first.

    A heap holds (counter, rank, client) of each client with such requests. Counters only grow, so an entry may be too
    low and is then put right when it comes to the top. The rank is drawn anew with each admission: equal counters take
    turns.
    """

    def __init__(self, counters: TokenCounters) -> None:
        self._counters = counters
        self._queues: dict[str, list[Request]] = {}     # by queue key
        self._ranks: dict[str, int] = {}                # of the valid entry of each client
        self._heap: list[tuple[float, int, str]] = []
        self._numbers = count()

    def __contains__(self, client: str) -> bool:
        """Return whether a client has such a request."""
        return client in self._queues

    def least_counter(self) -> float | None:
        """Return the least counter; None if there is no client."""
        client = self._first_client()
        return None if client is None else self._counters[client]

    def add(self, request: Request) -> None:
        """Queue a request."""
        client = request.client_id
        if client not in self._queues:
            self._queues[client] = []
            self._rank(client)
        insort(self._queues[client], request, key=queue_key_of)

    def remove(self, request: Request) -> None:
        """Remove a request that is admitted, or has ended."""
        client = request.client_id
        queue = self._queues[client]
        del queue[bisect_left(queue, request.queue_key, key=queue_key_of)]
        if queue:
            self._rank(client)
        else:
            del self._queues[client], self._ranks[client]

    def first(self, skipped: SkippedRequests | None) -> Request | None:
        """Return the first request, by the counters of clients and then by queue key, that is not skipped."""
        set_aside = []
        found = None
        while found is None and (client := self._first_client()) is not None:
            found = self._first_of(client, skipped)
            if found is None:
                set_aside.append(heappop(self._heap))
        for entry in set_aside:
            heappush(self._heap, entry)
        return found

    def _first_of(self, client: str, skipped: SkippedRequests | None) -> Request | None:
        queue = self._queues[client]
        if skipped is None:
            return queue[0]
        if client in skipped.clients:
            return None
        return next((request for request in queue if request not in skipped.requests), None)

    def _first_client(self) -> str | None:
        """Return the client with the least counter, after which its entry is at the top."""
        heap = self._heap
        while heap:
            counter, rank, client = heap[0]
            if self._ranks.get(client) != rank:
                heappop(heap)
            elif counter != self._counters[client]:
                heapreplace(heap, (self._counters[client], rank, client))
            else:
                return client
        return None

    def _rank(self, client: str) -> None:
        """Give a client a new entry behind those of equal counters; drop the invalid ones when they are the most."""
        rank = self._ranks[client] = next(self._numbers)
        heappush(self._heap, (self._counters[client], rank, client))
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [entry for entry in self._heap if self._ranks.get(entry[2]) == entry[1]]
            heapify(self._heap)


class FairShare(ByPriority):
    """Admit the first request of the client with the least counter; preempt the latest of the one with the largest.

    A client's own requests are in the order of `ByPriority`. An admitted request gets its queue key then, and keeps it:
    a preempted one comes back before any new one is admitted, so all admitted requests finish.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counters = TokenCounters()
        self._backlog = Backlog(self.counters)
        self._num_admitted = 0
        self._last_admitted = ""    # the client

    def add(self, request: Request) -> None:
        """Note a new request; lift its client if none of its requests competes."""
        client = request.client_id
        self.counters.add_request(client)
        if client not in self._backlog:
            least = self._backlog.least_counter() or 0.0
            self.counters.lift(client, max(least, self.counters[self._last_admitted]))

    def enqueue(self, request: Request) -> None:
        """Queue a request by its client's counter, unless it was admitted before."""
        if not _was_admitted(request):
            self._backlog.add(request)

    def dequeue(self, request: Request) -> None:
        """Remove a request from the competition."""
        if not _was_admitted(request):
            self._backlog.remove(request)

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

    def charge_prompt(self, request: Request) -> None:
        """Charge the prompt tokens that were not found in the cache."""
        self.counters.charge(request, INPUT_WEIGHT * (len(request.prompt_token_ids) - request.num_cached_tokens))

    def charge_outputs(self, sampled: Iterable[tuple[Request, Sequence]]) -> None:
        """Charge each sampled token."""
        for request, _ in sampled:
            self.counters.charge(request, OUTPUT_WEIGHT)

    def next_to_admit(
        self, waiting: list[Request], swapped: list[Request], skipped: SkippedRequests | None = None
    ) -> Request | None:
        """Return a preempted request, by queue key, if one waits or is swapped out, else the first new one."""
        for request in waiting:
            if not _was_admitted(request) or (swapped and request.queue_key > swapped[0].queue_key):
                break
            if skipped is None or request not in skipped:
                return request
        return swapped[0] if swapped else self._backlog.first(skipped)

    def planning_order(self, running: list[Request]) -> list[Request]:
        """Return the first by queue key, then the rest by their clients' counters."""
        counters = self.counters
        return running[:1] + sorted(running[1:], key=lambda request: counters[request.client_id])


def _was_admitted(request: Request) -> bool:
    return request.queue_key[0] == _ADMITTED
