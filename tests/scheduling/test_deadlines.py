"""Deadlines in the scheduler, with a scripted clock: which requests end, how, and that nothing of them stays behind."""

import random

import pytest

from quire.core.sampling_params import BeamSearchParams
from quire.core.sequence import Request
from support.ragged_executor import RaggedExecutor
from support.scheduling import Harness, random_run


@pytest.mark.parametrize("kind", ["any", "crowded", "windowed", "sent", "ragged"])
@pytest.mark.parametrize("seed", range(16))
def test_random_deadlines_lose_no_block_and_change_no_token(seed: int, kind: str) -> None:
    executor = {"executor_class": RaggedExecutor} if kind == "ragged" else {}
    harness = random_run(
        seed, late=True, crowded=kind == "crowded", windowed=kind == "windowed", sends=kind == "sent", **executor
    )
    for delta in harness.late.values():
        assert (delta.error is None) == (delta.finish_reason == "length") == (delta.stop_reason == "deadline")


def _outcome(harness: Harness, request: Request, index: int = 0) -> tuple[str | None, int]:
    """How a branch has ended, and with how many tokens."""
    key = request.request_id, index
    return harness.reasons.get(key), len(harness.outputs.get(key, []))


@pytest.mark.parametrize("field", ["ttft_deadline_ms", "deadline_ms"])
@pytest.mark.parametrize("place", ["waiting", "computing its prompt"])
def test_request_without_a_token_fails_and_frees_all_in_that_step(field: str, place: str) -> None:
    harness = Harness(num_blocks=32, max_num_seqs=1, budget=4)
    if place == "waiting":
        harness.add(3, max_tokens=50, ignore_eos=True)
    late = harness.add(20, max_tokens=5, **{field: 1000})
    for _ in range(2):
        harness.step()
    harness.now_s = 0.999
    harness.step()
    assert harness.scheduler.queues.requests[late.request_id] is late
    num_free = harness.cache.num_free_blocks
    harness.now_s = 1.0
    harness.schedule()
    assert late.request_id not in harness.scheduler.queues.requests
    assert late.live == []
    if place != "waiting":
        assert num_free < harness.cache.num_free_blocks == harness.num_blocks
        (delta,) = harness.scheduler.take_deltas()
        assert (delta.request_id, delta.is_late, delta.param) == (late.request_id, True, field)
        assert delta.error == f"the first token was not there within 1000 ms ({field})"
        harness.assert_empty()


def test_answer_that_has_begun_ends_with_what_is_there() -> None:
    harness = Harness(num_blocks=32)
    late = harness.add(5, max_tokens=50, ignore_eos=True, ttft_deadline_ms=100, deadline_ms=1000, logprobs=2)
    other = harness.add(5, max_tokens=8, ignore_eos=True)
    for _ in range(4):
        harness.step()
        harness.now_s += 0.2                            # past the deadline of the first token, which was in time
    harness.now_s = 1.0
    harness.run()
    assert _outcome(harness, late) == ("length", 4)
    assert harness.late[late.request_id, 0].stop_reason == "deadline"
    assert harness.late[late.request_id, 0].logprobs == []
    assert _outcome(harness, other) == ("length", 8)
    harness.assert_right(late, whole=False)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_answer_ends_with_what_is_there(mode: str) -> None:
    harness = Harness(num_blocks=10, num_swap_blocks=10, mode=mode, max_num_seqs=4)
    harness.add(8, max_tokens=30, ignore_eos=True)
    late = harness.add(8, max_tokens=20, ignore_eos=True, deadline_ms=1000)
    while not late.num_preemptions:
        harness.step()
    _, num_tokens = _outcome(harness, late)
    assert late in (harness.scheduler.queues.swapped if mode == "swap" else harness.scheduler.queues.waiting)
    harness.now_s = 1.0
    harness.step()
    assert _outcome(harness, late) == ("length", num_tokens)
    assert num_tokens > 0
    assert harness.cache.swap_space.num_free_blocks == 10
    harness.run()


def test_all_branches_end_those_that_ended_before_as_they_did() -> None:
    harness = Harness(num_blocks=64)
    late = harness.add(5, n=3, max_tokens=50, ignore_eos=True, deadline_ms=1000)
    for _ in range(3):
        harness.step()
    assert harness.scheduler.finish(late.request_id, 1)
    harness.now_s = 1.0
    harness.run()
    assert [_outcome(harness, late, index) for index in range(3)] == [("length", 3), (None, 3), ("length", 3)]


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_beam_search_answers_with_its_beams_as_they_are(num_steps: int) -> None:
    harness = Harness(num_blocks=64)
    late = harness.add_beams(5, BeamSearchParams(beam_width=3, max_tokens=20, ignore_eos=True), deadline_ms=1000)
    for _ in range(num_steps):
        harness.step()
    harness.now_s = 1.0
    harness.run()
    if not num_steps:
        assert harness.reasons[late.request_id, 0] == "error"
        return
    assert [_outcome(harness, late, index) for index in range(3)] == [("length", num_steps)] * 3
    ranked = [harness.logprobs[late.request_id, index] for index in range(3)]
    assert ranked == sorted(ranked, reverse=True)


def test_pinned_prefix_outlives_the_deadlines_of_those_that_share_it() -> None:
    harness = Harness(num_blocks=32, caching=True, max_model_len=64)
    prefix = list(range(8))
    harness.pin(prefix)
    harness.run()
    num_pinned = harness.cache.pins.num_blocks
    harness.add([*prefix, 9], max_tokens=50, ignore_eos=True, deadline_ms=1000)
    harness.step()
    harness.now_s = 1.0
    harness.run()
    assert harness.cache.pins.num_blocks == num_pinned > 0


def test_static_batch_returns_the_answers_that_it_withheld() -> None:
    harness = Harness(
        num_blocks=16, policy="contiguous-max", batching="static", max_model_len=16, max_num_seqs=4,
        scheduling_policy="fcfs",
    )  # fmt: skip
    short = harness.add(3, max_tokens=2, ignore_eos=True, deadline_ms=1000)
    long = harness.add(3, max_tokens=9, ignore_eos=True, deadline_ms=1000)
    for _ in range(4):
        harness.step()
    harness.now_s = 1.0
    harness.run()
    assert _outcome(harness, short) == ("length", 2)
    assert (short.request_id, 0) not in harness.late
    assert _outcome(harness, long) == ("length", 4)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_deadlines_give_no_rank(policy: str) -> None:
    def plans(ttft_deadline_ms: int | None) -> list[tuple[list[int], list[int]]]:
        harness = Harness(num_blocks=20, scheduling_policy=policy, max_num_seqs=3, budget=8)
        for number in range(8):
            asked = {} if number % 2 else {"ttft_deadline_ms": ttft_deadline_ms}
            harness.add(6, max_tokens=9, ignore_eos=True, client_id=str(number % 2), **asked)
        planned = []
        while harness.scheduler.has_requests:
            plan = harness.schedule()
            planned.append((plan.rows, plan.counts))
            harness.execute(plan)
        return planned

    assert plans(1) == plans(None)                      # the clock stands at 0: none passes


def test_entries_of_ended_requests_are_dropped() -> None:
    harness, rng = Harness(num_blocks=16), random.Random(0)
    deadlines = harness.scheduler._deadlines
    for _ in range(1000):
        request = harness.add(3, max_tokens=2, deadline_ms=rng.randint(1, 10**6))
        harness.scheduler.abort(request.request_id)
    assert len(deadlines) <= 64
