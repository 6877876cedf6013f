"""Queue of an engine's client: what waits before a request, without a walk over all of it."""

import random

import pytest

from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.core.step_times import StepWork, chunk_work
from quire.engine.processes.forecast import Asked, Before, QueuedRequests
from support.scheduling import make_request

OWN = chunk_work(0, 100)


def request(number: int, length: int, priority: int = 0, client_id: str = "", n: int = 1) -> Request:
    made = make_request(number, [0] * length, SamplingParams(n=n))
    made.priority, made.client_id = priority, client_id
    return made


def queue(*requests: Request) -> QueuedRequests:
    queued = QueuedRequests()
    for each in requests:
        queued.add(each)
    return queued


def test_only_what_comes_before_counts() -> None:
    queued = queue(request(0, 10, priority=5), request(1, 20, priority=5), request(2, 30))
    assert queued.before(Asked(OWN), "priority").prompts.num_tokens == 30
    assert queued.before(Asked(OWN), "fcfs").prompts.num_tokens == 60
    assert queued.before(Asked(OWN, priority=5), "priority").num_requests == 3


def test_other_clients_have_as_much_before_a_request_as_its_own() -> None:
    queued = queue(request(0, 10_000, client_id="many"), request(1, 50, client_id="own"))
    assert queued.before(Asked(OWN, client_id="own"), "fair").prompts.num_tokens == pytest.approx(50 + 150)
    assert queued.before(Asked(OWN, client_id="own"), "fcfs").prompts.num_tokens == 10_050


def test_totals_are_those_of_the_requests_that_are_left() -> None:
    rng, queued, left = random.Random(0), QueuedRequests(), dict[int, Request]()
    for number in range(200):
        if left and rng.random() < 0.5:
            queued.discard(rng.choice([*left, -1]))
            left = {each: left[each] for each in left if each in queued}
        else:
            made = request(number, rng.randrange(1, 60_000), rng.randrange(3), rng.choice("abc"), rng.choice([1, 3]))
            left[number] = made
            queued.add(left[number])
        works = [chunk_work(0, len(each.prompt_token_ids)) for each in left.values()]
        assert queued.before(Asked(), "fcfs") == Before(len(left), sum(works, StepWork()))
        assert queued.num_tokens == sum(each.num_queued_tokens for each in left.values())
    queued.clear()
    assert (len(queued), queued.num_tokens, queued.before(Asked(), "priority")) == (0, 0, Before())


def test_a_look_does_not_walk_the_queue() -> None:
    queued = queue(*(request(number, 50, client_id=f"client {number % 5}") for number in range(1_000)))
    assert (len(queued._by_priority), len(queued._by_client)) == (1, 5)
