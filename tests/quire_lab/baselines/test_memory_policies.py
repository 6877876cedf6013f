"""The scheduler over memory that is reserved ahead, continuous and static: same tokens, and the order of requests."""

import random
from typing import get_args

import pytest

from quire.core.config import CacheConfig, MemoryPolicy, SchedulerConfig
from quire.core.errors import ContextLengthError, InvalidRequestError
from quire.scheduling.scheduler import make_scheduler
from quire_lab.baselines.buddy_pool import num_reserved_tokens
from support.scheduling import Harness, random_beams, random_params

CONTIGUOUS = get_args(MemoryPolicy)[1:]


@pytest.mark.parametrize(
    ("policy", "prompt", "output", "reserved"),
    [
        ("contiguous-max", 100, 25, 2048),
        ("contiguous-pow2", 100, 25, 132),
        ("contiguous-oracle", 100, 25, 125),
        ("contiguous-pow2", 100, 32, 132),
        ("contiguous-pow2", 1800, 130, 2048),
        ("contiguous-pow2", 1, 1, 2),
    ],
)
def test_the_papers_reservations(policy: MemoryPolicy, prompt: int, output: int, reserved: int) -> None:
    assert num_reserved_tokens(policy, prompt, output, 2048) == reserved


@pytest.mark.parametrize("output", [1, 100, 1024])
def test_a_chat_with_a_long_prompt_takes_the_same_chunk_in_all_three_orcas(output: int) -> None:
    sizes = {num_reserved_tokens(policy, 1024, output, 2048) - 1 for policy in CONTIGUOUS}
    assert {1 << size.bit_length() for size in sizes} == {2048}


@pytest.mark.parametrize(("policy", "num_running"), [*zip(CONTIGUOUS, [2, 4, 8], strict=True)])
def test_reserving_less_lets_more_in(policy: MemoryPolicy, num_running: int) -> None:
    harness = Harness(16, block_size=4, max_num_seqs=16, budget=64, max_model_len=32, policy=policy)
    for _ in range(12):
        harness.add(3, max_tokens=5, ignore_eos=True)
    harness.step()
    assert len(harness.scheduler.queues.running) == num_running
    harness.run()


def test_orders_are_kept_although_a_later_request_would_fit() -> None:
    harness = Harness(8, block_size=4, budget=64, max_model_len=32, policy="contiguous-oracle")
    for output_len in (10, 30, 3):
        harness.add(2, max_tokens=output_len, ignore_eos=True)
    harness.step()
    assert len(harness.scheduler.queues.running) == 1
    harness.run()


def test_what_could_never_have_its_chunks_is_refused_with_the_numbers() -> None:
    harness = Harness(6, block_size=4, max_model_len=24, policy="contiguous-max")
    with pytest.raises(ContextLengthError, match="reserves 24 tokens for each of 1 sequences, but only 0"):
        harness.add(2, max_tokens=3)
    harness = Harness(12, block_size=4, max_model_len=16, policy="contiguous-max")
    with pytest.raises(ContextLengthError, match="16 tokens for each of 4 sequences, but only 3"):
        harness.add(2, n=4, max_tokens=3)
    with pytest.raises(InvalidRequestError, match="prefix caching is off"):
        harness.pin([1, 2, 3])
    harness.run()


@pytest.mark.parametrize("seed", range(30))
def test_random_runs_give_the_tokens_that_each_request_gives_alone(seed: int) -> None:
    rng = random.Random(seed)
    policy = rng.choice(CONTIGUOUS)
    is_static = policy == "contiguous-max" and rng.random() < 0.6
    harness = Harness(
        rng.randint(10, 90),
        block_size=rng.choice([2, 4]),
        max_num_seqs=rng.choice([1, 4, 16]),
        budget=rng.choice([1, 3, 16, 200]),
        max_model_len=rng.choice([20, 60]),
        policy=policy,
        batching="static" if is_static else "continuous",
    )
    ended = set[int]()
    for _ in range(120):
        if rng.random() < 0.3:
            try:
                if rng.random() < 0.3:
                    harness.add_beams(rng.randint(1, 12), random_beams(rng), eos=rng.sample(range(50), 2))
                else:
                    harness.add(rng.randint(1, 12), eos=(1,), **random_params(rng, crowded=False))
            except InvalidRequestError:
                pass
        if harness.requests and rng.random() < 0.05:
            request_id = rng.randrange(len(harness.requests))
            ended |= {request_id} if harness.scheduler.abort(request_id) else set()
        if rng.random() < 0.03:
            harness.fail_step(is_run=rng.random() < 0.5)
        harness.step()
    harness.run()
    assert sum(harness.scheduler.preemption.stats.num_preemptions.values()) == sum(
        request.num_preemptions for request in harness.requests.values()
    )
    for request in harness.requests.values():
        harness.assert_right(request, whole=request.request_id not in ended)


class TestStatic:
    @staticmethod
    def harness() -> Harness:
        return Harness(12, block_size=4, budget=200, max_model_len=16, policy="contiguous-max", batching="static")

    def test_a_batch_is_as_large_as_fits_and_nobody_joins_it(self) -> None:
        harness = self.harness()
        for output_len in (2, 9, 4, 3):
            harness.add(3, max_tokens=output_len, ignore_eos=True)
        finished = []
        while harness.scheduler.has_requests:
            deltas = harness.step()
            finished.append(sorted(delta.request_id for delta in deltas if delta.finish_reason))
        assert finished[:9] == [[]] * 8 + [[0, 1, 2]], "all are answered when the longest is"
        assert finished[9:] == [[], [], [3]]
        harness.assert_empty()
        for request in harness.requests.values():
            harness.assert_right(request)

    def test_whoever_has_ended_is_computed_on_for_nothing(self) -> None:
        harness = self.harness()
        for output_len in (2, 9):
            harness.add(3, max_tokens=output_len, ignore_eos=True)
        harness.run()
        assert harness.executor.num_computed == 2 * (3 + 8)

    def test_padding_ends_where_the_model_can_compute_no_more(self) -> None:
        harness = self.harness()
        harness.add(14, max_tokens=1, ignore_eos=True)
        harness.add(1, max_tokens=15, ignore_eos=True)
        harness.run()
        assert harness.executor.num_computed == 15 + 15
        for request in harness.requests.values():
            harness.assert_right(request)

    def test_an_aborted_request_is_not_answered_at_the_end(self) -> None:
        harness = self.harness()
        harness.add(3, max_tokens=1, ignore_eos=True)
        harness.add(3, max_tokens=4, ignore_eos=True)
        harness.step()
        assert harness.scheduler.abort(0)
        harness.run()
        assert harness.reasons == {(1, 0): "length"}

    def test_a_branch_that_is_finished_from_outside_is_not_answered_twice(self) -> None:
        harness = self.harness()
        harness.add(3, max_tokens=1, ignore_eos=True)
        harness.add(3, max_tokens=4, ignore_eos=True)
        harness.step()
        assert harness.scheduler.finish(0, 0)
        harness.run()
        assert harness.reasons == {(1, 0): "length"}

    def test_it_needs_room_for_padding(self) -> None:
        with pytest.raises(AssertionError, match="no room for padding"):
            make_scheduler(SchedulerConfig(batching="static"), CacheConfig(8))
