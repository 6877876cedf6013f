"""Requests of an engine that were sent and not yet admitted, with totals of what waits before another request.

Totals are kept by priority and by client, so a forecast for each call of a server does not walk the queue. All work is
in whole tokens and pairs: sums are exact, and nothing is left of what was removed.
"""

from typing import NamedTuple, TypeVar

from quire.core.config import SchedulingPolicy
from quire.core.sequence import Request
from quire.core.step_times import StepWork, chunk_work

Key = TypeVar("Key")


class Asked(NamedTuple):
    """A request that may be sent, as far as its place in the order and its work are concerned."""

    prompt: StepWork = StepWork()   # work of its prompts
    priority: int = 0
    client_id: str = ""
    weight: float = 1.0
    num_requests: int = 1
    knows_cached: bool = False      # `prompt` is without what is cached


def asked_of(request: Request) -> Asked:
    """Return what a request asks for."""
    prompt = chunk_work(0, len(request.prompt_token_ids))
    return Asked(prompt, request.priority, request.client_id, request.weight)


class Before(NamedTuple):
    """What waits before a request: how many requests, and the work of their prompts."""

    num_requests: int = 0
    prompts: StepWork = StepWork()


_NONE = Before()


class QueuedRequests:
    """The requests by number."""

    def __init__(self) -> None:
        self.requests = dict[int, Request]()
        self.num_tokens = 0                         # prompt tokens x n
        self._by_priority = dict[int, Before]()
        self._by_client = dict[str, Before]()
        self._weights = dict[str, float]()          # clients, by their last requests

    def __len__(self) -> int:
        return len(self.requests)

    def __contains__(self, request_id: int) -> bool:
        """Return whether a request is here."""
        return request_id in self.requests

    def add(self, request: Request) -> None:
        """Add a request that is about to be sent."""
        self.requests[request.request_id] = request
        self._weights[request.client_id] = request.weight
        self._count(request, 1)

    def discard(self, request_id: int) -> None:
        """Remove a request, if it is here."""
        if (request := self.requests.pop(request_id, None)) is not None:
            self._count(request, -1)

    def clear(self) -> None:
        for request_id in list(self.requests):
            self.discard(request_id)

    def before(self, asked: Asked, policy: SchedulingPolicy) -> Before:
        """Return what waits before a request by a policy, without ageing: it puts no later request before an earlier.

        Under `fair` each other client has as much before it as its own client has, by their weights.
        """
        first = {key: each for key, each in self._by_priority.items() if policy != "priority" or key <= asked.priority}
        num_requests = sum(each.num_requests for each in first.values())
        total = sum((each.prompts for each in first.values()), StepWork())
        if policy != "fair":
            return Before(num_requests, total)
        own = self._by_client.get(asked.client_id, Before()).prompts
        share = (own.num_tokens + asked.prompt.num_tokens) / asked.weight
        for client_id, (_, work) in self._by_client.items():
            if client_id != asked.client_id:
                part = min(1.0, share * self._weights[client_id] / max(work.num_tokens, 1.0))
                own += StepWork(*(part * each for each in work))
        return Before(round(num_requests * own.num_tokens / max(total.num_tokens, 1.0)), own)

    def _count(self, request: Request, sign: int) -> None:
        """Add a request to the totals, or subtract it."""
        num_tokens, num_attended, num_context = chunk_work(0, len(request.prompt_token_ids))
        self.num_tokens += sign * len(request.prompt_token_ids) * request.params.n
        work = StepWork(sign * num_tokens, sign * num_attended, sign * num_context)
        _add(self._by_priority, request.priority, sign, work)
        _add(self._by_client, request.client_id, sign, work)
        if request.client_id not in self._by_client:
            del self._weights[request.client_id]


def _add(totals: dict[Key, Before], key: Key, num_requests: int, work: StepWork) -> None:
    known = totals.get(key, _NONE)
    if num_requests + known.num_requests:
        totals[key] = Before(known.num_requests + num_requests, known.prompts + work)
    else:
        del totals[key]
