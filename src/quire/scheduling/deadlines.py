"""Deadlines of requests: finds those that have passed without a look at the others, and says how such requests end.

A deadline gives no rank: it only ends a request. One without a token fails; an answer that has begun ends with what is
there.
"""

import math
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush

from quire.core.deltas import SequenceDelta
from quire.core.sequence import Request, Sequence, SequenceStatus

DEADLINE = "deadline"   # the stop_reason of an answer that has ended by it
_SPARE = 64             # entries of ended requests that are never worth a sweep


class Deadlines:
    """A heap of the next deadline of each request that has one. `requests`: those that have not ended, by id."""

    def __init__(self, requests: Mapping[int, Request]) -> None:
        self._requests = requests
        self._heap: list[tuple[float, int]] = []        # (time, request id); some requests have ended since
        self.next_s = math.inf                          # no deadline passes before

    def __len__(self) -> int:
        """Count the entries, of ended requests too: at most about twice as many as there are requests."""
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Add the next deadline of a request, if there is one."""
        due_s = request.due_s
        if due_s == math.inf:
            return
        if len(self._heap) >= 2 * len(self._requests) + _SPARE:
            self._heap = [entry for entry in self._heap if entry[1] in self._requests]
            heapify(self._heap)
        heappush(self._heap, (due_s, request.request_id))
        self.next_s = self._heap[0][0]

    def take_passed(self, now_s: float) -> Iterator[Request]:
        """Yield the requests whose deadlines have passed, once each. The caller ends them."""
        while self._heap and self._heap[0][0] <= now_s:
            request = self._requests.get(heappop(self._heap)[1])
            if request is None:
                continue
            if request.due_s <= now_s:
                yield request
            else:
                self.add(request)                       # its first token was in time: the next one is for its end
        self.next_s = self._heap[0][0] if self._heap else math.inf

    def check(self) -> None:
        """Assert that each request with a deadline has an entry that is not too late."""
        due_s = {request_id: request.due_s for request_id, request in self._requests.items()}
        entered: dict[int, float] = {}
        for entry_s, request_id in self._heap:
            entered[request_id] = min(entry_s, entered.get(request_id, math.inf))
        assert self.next_s == min(self._heap, default=(math.inf, 0))[0], f"the next deadline is not at {self.next_s}"
        late = [id_ for id_, each in due_s.items() if each < entered.get(id_, math.inf)]
        assert not late, f"requests {late} have deadlines and no entries in time"


def late_failure(request: Request) -> SequenceDelta:
    """Return the end of a request that has no token when a deadline passes."""
    params = request.params
    asked = {"ttft_deadline_ms": params.ttft_deadline_ms, "deadline_ms": params.deadline_ms}
    field, most = min(((name, each) for name, each in asked.items() if each is not None), key=lambda each: each[1])
    error = f"the first token was not there within {most} ms ({field})"
    return SequenceDelta(request.request_id, 0, [], error=error, param=field, is_late=True)


def late_end(request: Request, sequence: Sequence) -> SequenceDelta:
    """Return the end of a branch that has a token, with no further ones."""
    delta = SequenceDelta(request.request_id, sequence.index, [], finish_reason="length")
    delta.stop_reason, delta.is_late = DEADLINE, True
    if request.params.logprobs is not None:
        delta.logprobs = []
    return delta


def late_ends(request: Request) -> list[SequenceDelta]:
    """Return the ends of the branches of a request that are still extended."""
    return [late_end(request, each) for each in request.live if each.status is not SequenceStatus.PADDING]
