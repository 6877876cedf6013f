"""Shares of clients by virtual token counters: the bound of the paper, equal service, liveness, bounded memory."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.scheduling import fair_share
from quire.scheduling.fair_share import INPUT_WEIGHT, OUTPUT_WEIGHT, FairShare
from support.scheduling import Harness, make_request


def fair_harness(num_blocks: int = 200, **settings: int) -> Harness:
    return Harness(num_blocks, scheduling_policy="fair", **settings)  # type: ignore[arg-type]


def admitted(harness: Harness) -> list[str]:
    """Step until nothing is left; return the clients of requests in the order in which they were first admitted."""
    order: list[Request] = []
    while harness.scheduler.has_requests:
        harness.step()
        order += [request for request in harness.scheduler.step.admitted if request not in order]
    return [request.client_id for request in order]


def test_clients_take_turns_whatever_the_order_of_arrival() -> None:
    harness = fair_harness(max_num_seqs=1)
    for client in "aaaabb":
        harness.add(4, max_tokens=2, ignore_eos=True, client_id=client)
    assert admitted(harness) == ["a", "b", "a", "b", "a", "a"]


def test_rows_that_are_free_at_once_are_shared() -> None:
    harness = fair_harness(max_num_seqs=4, budget=64)
    for client in "aaaaaabb":
        harness.add(4, max_tokens=8, ignore_eos=True, client_id=client)
    harness.step()
    assert Counter(request.client_id for request in harness.scheduler.queues.running) == {"a": 2, "b": 2}


def test_own_requests_are_in_order_of_priority_and_change_nothing_for_other_clients() -> None:
    harness = fair_harness(max_num_seqs=1)
    for client, priority in (("a", 0), ("a", -5), ("b", 9), ("b", 0)):
        harness.add(4, max_tokens=2, ignore_eos=True, client_id=client, priority=priority)
    order: list[tuple[str, int]] = []
    while harness.scheduler.has_requests:
        harness.step()
        order += [(request.client_id, request.priority) for request in harness.scheduler.step.admitted]
    assert order == [("a", -5), ("b", 0), ("a", 0), ("b", 9)]


def test_cached_tokens_are_free() -> None:
    harness = fair_harness(max_num_seqs=1, caching=True)
    prompt = list(range(16))
    for client in "ab":
        harness.add(prompt, max_tokens=1, client_id=client)
    harness.run()
    counters = harness.scheduler.order.counters  # type: ignore[attr-defined]
    assert counters["a"] == 16 * INPUT_WEIGHT + OUTPUT_WEIGHT
    assert counters["b"] < counters["a"] + 8 * INPUT_WEIGHT, "at most the last block is computed again"


def test_weight_divides_the_cost() -> None:
    harness = fair_harness(max_num_seqs=1)
    for _ in range(30):
        harness.add(6, max_tokens=3, ignore_eos=True, client_id="a", weight=2.0)
        harness.add(6, max_tokens=3, ignore_eos=True, client_id="b")
    served = Counter[str]()
    for _ in range(90):
        harness.step()
        served.update(request.client_id for request in harness.scheduler.step.admitted)
    assert 1.8 <= served["a"] / served["b"] <= 2.2


def test_absent_client_has_not_saved_up() -> None:
    """One that comes late is lifted to the others: it does not get all rows until it has caught up."""
    harness = fair_harness(max_num_seqs=1)
    for _ in range(40):
        harness.add(4, max_tokens=2, ignore_eos=True, client_id="a")
    for _ in range(20):
        harness.step()
    for _ in range(10):
        harness.add(4, max_tokens=2, ignore_eos=True, client_id="b")
    order = admitted(harness)
    assert Counter(order[:10])["b"] in range(4, 7)


def test_what_a_client_was_lifted_by_is_not_service() -> None:
    harness = fair_harness(max_num_seqs=2)
    harness.add(40, max_tokens=2, ignore_eos=True, client_id="a")
    harness.run()
    harness.add(4, max_tokens=9, ignore_eos=True, client_id="a", weight=2.0)
    harness.add(4, max_tokens=9, ignore_eos=True, client_id="b")
    harness.step()
    policy = harness.scheduler.order
    assert isinstance(policy, FairShare)
    assert policy.counters["b"] == 44 + 6, "lifted to the client that was admitted last"
    assert policy.served() == {"a": 44 + 6 / 2, "b": 6}
    harness.run()
    assert policy.served() == {}


def test_latest_request_of_the_client_with_the_largest_counter_is_preempted() -> None:
    harness = fair_harness(num_blocks=22, max_num_seqs=4, budget=64)
    many = [harness.add(8, max_tokens=40, ignore_eos=True, client_id="many") for _ in range(3)]
    harness.step()
    few = harness.add(8, max_tokens=24, ignore_eos=True, client_id="few")
    harness.run()
    assert many[0].num_preemptions == 0, "the first in order never is"
    assert many[2].num_preemptions > 0
    assert few.num_preemptions == 0, "though it came last"
    for request in (*many, few):
        harness.assert_right(request)


def test_stream_of_new_clients_does_not_keep_a_known_one_waiting() -> None:
    harness = fair_harness(max_num_seqs=1)
    for _ in range(2):
        known = harness.add(8, max_tokens=8, ignore_eos=True, client_id="known")
    for number in range(200):
        harness.add(4, max_tokens=2, ignore_eos=True, client_id=f"new {number}")
        harness.step()
        if known not in harness.scheduler.queues.waiting:
            break
    assert known not in harness.scheduler.queues.waiting
    assert len(harness.scheduler.queues.waiting) > 10, "new ones did wait meanwhile"
    harness.run()


def test_absent_clients_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_share, "MAX_ABSENT", 10)
    harness = fair_harness()
    policy = harness.scheduler.order
    assert isinstance(policy, FairShare)
    for number in range(300):
        request = harness.add(4, max_tokens=2, client_id=f"client {number}")
        if number % 2:
            harness.scheduler.abort(request.request_id)
        else:
            harness.step()
    harness.run()
    assert len(policy.counters) <= 10 + 1
    assert len(policy.counters._lifted) <= 10 + 1
    assert len(policy._competing._heap) <= 64 + 2
    assert not policy._num_new


@pytest.mark.parametrize("seed", range(6))
def test_order_of_the_backlog_is_that_of_a_plain_search(seed: int) -> None:
    """The heap against the minimum over all clients, with admissions, aborts, and costs in between."""
    rng, policy, waiting = random.Random(seed), FairShare(), list[Request]()
    line = policy.make_line()
    running: list[Request] = []
    for number in range(400):
        request = make_request(number, [1] * rng.randint(1, 9), SamplingParams(max_tokens=1))
        request.client_id, request.weight = f"client {rng.randrange(12)}", rng.choice([0.5, 1.0, 3.0])
        request.queue_key = policy.queue_key(request, number)
        policy.add(request)
        policy.enqueue(request)
        line.add(request)
        waiting.append(request)
        for _ in range(rng.choice([0, 1, 2])):
            found = line.first()
            if found is None:
                break
            least = min(policy.counters[each.client_id] for each in waiting)
            assert policy.counters[found.client_id] == least
            assert found is next(each for each in waiting if each.client_id == found.client_id)
            waiting.remove(found)
            line.remove(found)
            policy.dequeue(found)
            found.queue_key = policy.admit(found)
            policy.charge_prompt(found)
            running.append(found)
        for one in rng.sample(running, len(running) // 2):
            policy.counters.charge(one, OUTPUT_WEIGHT)
        if waiting and rng.random() < 0.2:
            gone = waiting.pop(rng.randrange(len(waiting)))
            line.remove(gone)
            policy.dequeue(gone)
            policy.finish(gone)
        if running and rng.random() < 0.5:
            policy.finish(running.pop(rng.randrange(len(running))))


def test_held_requests_do_not_compete() -> None:
    """As while a request that makes steps fail is being isolated."""
    harness = fair_harness(max_num_seqs=1)
    requests = [harness.add(4, max_tokens=2, ignore_eos=True, client_id=client) for client in "aabb"]
    harness.scheduler.queues.hold_all_but({requests[3].request_id})
    harness.step()
    assert harness.scheduler.queues.running == [requests[3]]
    harness.scheduler.abort(requests[0].request_id)
    harness.scheduler.queues.release_all()
    harness.run()
    for request in requests[1:]:
        harness.assert_right(request)


# --- the bound of the paper -------------------------------------------------------------------------------------------

sizes = st.tuples(st.integers(1, 24), st.integers(1, 12))  # tokens of a prompt, and of its answer
loads = st.lists(sizes, min_size=1, max_size=16)


def most_unfair(requests: list[Request], max_num_seqs: int) -> float:
    """2 * max(w_in * L_input, w_out * M) of theorem 4.4; M: the most tokens that the requests of a batch come to."""
    longest_prompt = max(len(request.prompt_token_ids) for request in requests)
    batch_tokens = max_num_seqs * max(len(request.prompt_token_ids) + request.max_tokens for request in requests)
    return 2.0 * max(INPUT_WEIGHT * longest_prompt, OUTPUT_WEIGHT * batch_tokens)


@pytest.mark.parametrize("num_blocks", [10, 200], ids=["preemptions", "no preemptions"])
@settings(deadline=None, max_examples=60)
@given(first=loads, second=loads, max_num_seqs=st.integers(1, 5), budget=st.integers(1, 40), late=st.integers(0, 20))
def test_service_of_two_clients_that_wait_differs_by_the_papers_bound(
    num_blocks: int, first: list[tuple[int, int]], second: list[tuple[int, int]], max_num_seqs: int, budget: int,
    late: int,
) -> None:  # fmt: skip
    """Over every stretch in which both have waiting requests, however unequal their loads, and whoever came first."""
    harness = Harness(num_blocks, 4, max_num_seqs, budget, scheduling_policy="fair")
    served = Counter[str]()
    ahead: list[int] = []   # a request of the first client, since both have been waiting
    requests = [harness.add(p, max_tokens=o, ignore_eos=True, client_id="first") for p, o in first]
    for number in range(10_000):
        if number == late:
            requests += [harness.add(p, max_tokens=o, ignore_eos=True, client_id="second") for p, o in second]
        if number >= late and not harness.scheduler.has_requests:
            break
        deltas = harness.step()
        for request in harness.scheduler.step.admitted:
            if not request.num_preemptions:
                served[request.client_id] += INPUT_WEIGHT * (len(request.prompt_token_ids) - request.num_cached_tokens)
        for delta in deltas:
            served[harness.requests[delta.request_id].client_id] += OUTPUT_WEIGHT * len(delta.token_ids)
        new = {request.client_id for request in harness.scheduler.queues.waiting if not request.num_preemptions}
        if len(new) < 2:
            ahead.clear()
            continue
        ahead.append(served["first"] - served["second"])
        assert max(ahead) - min(ahead) <= most_unfair(requests, max_num_seqs)
    assert not harness.scheduler.has_requests
    for request in requests:
        harness.assert_right(request)
