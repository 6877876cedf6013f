"""The scheduler over a cache that finds prefixes: computed tokens, requests that wait for others, what comes back."""

from collections.abc import Iterator

import pytest

from quire.core.plan import BlockCopy
from quire.core.sequence import Request
from quire.scheduling.plan_builder import PlanBuilder
from support.scheduling import Harness

PREFIX = list(range(40))  # ten blocks of four


def harness_of(num_blocks: int = 100, **options: int) -> Harness:
    return Harness(num_blocks=num_blocks, block_size=4, caching=True, **options)  # type: ignore[arg-type]


def counts(harness: Harness) -> list[int]:
    """Tokens of each entry of the last step."""
    counted = harness.executor.trace[-1][2]
    assert isinstance(counted, list)
    return counted


def admitted(harness: Harness) -> list[int]:
    return [request.request_id for request in harness.scheduler.step.admitted]


def finish(harness: Harness, *requests: Request) -> None:
    harness.run()
    for request in requests:
        harness.assert_right(request)


@pytest.fixture
def warm() -> Iterator[Harness]:
    """A cache that knows the prefix; the request that brought it has ended."""
    harness = harness_of(budget=64)
    finish(harness, harness.add(PREFIX, max_tokens=1))
    yield harness
    for request in harness.requests.values():
        harness.assert_right(request)


class TestFinding:
    def test_budget_pays_for_what_is_not_cached(self, warm: Harness) -> None:
        first, second = warm.add([*PREFIX, 1, 2, 3], max_tokens=3), warm.add([*PREFIX, 4], max_tokens=3)
        warm.step()
        assert counts(warm) == [3, 1]
        assert [request.num_cached_tokens for request in (first, second)] == [40, 40]
        assert warm.cache.stats().used_blocks == 10 + 2
        warm.run()

    @pytest.mark.parametrize("length", [4, 20, 40])
    def test_prompt_that_is_there_whole_computes_its_last_token(self, warm: Harness, length: int) -> None:
        request = warm.add(PREFIX[:length], max_tokens=6, ignore_eos=True)
        plan = warm.scheduler.schedule()
        assert (plan.starts, plan.counts, plan.stored_entries, plan.copies) == ([length - 1], [1], [0], [])
        assert request.num_cached_tokens == length - 1
        warm.scheduler.roll_back()
        warm.run()

    @pytest.mark.parametrize("length", [3, 6, 7, 39])
    def test_match_inside_of_a_block_copies_it(self, warm: Harness, length: int) -> None:
        request = warm.add([*PREFIX[:length], 49, 49], max_tokens=6, ignore_eos=True)
        warm.step()
        assert request.num_cached_tokens == length
        assert counts(warm) == [2]
        copies = warm.executor.trace[-1][3]
        assert isinstance(copies, list)
        assert [type(copy) for copy in copies] == [BlockCopy]
        warm.run()

    def test_next_turn_of_a_chat_finds_the_last_answer(self, warm: Harness) -> None:
        prompt = [*PREFIX, 9, 8, 7]
        warm.add(prompt, max_tokens=30, ignore_eos=True)
        warm.run()
        answer = warm.outputs[1, 0]
        second = warm.add([*prompt, *answer, 1, 2], max_tokens=5)
        warm.run()
        assert second.num_cached_tokens == (43 + 29) // 4 * 4, "the last token of an answer is never computed"

    def test_salts_keep_requests_apart(self, warm: Harness) -> None:
        for salt in ("a", "b", "a"):
            warm.add(PREFIX, max_tokens=2, salt=salt)
            warm.run()
        assert [request.num_cached_tokens for request in warm.requests.values()] == [0, 0, 0, 39]

    def test_prompt_logprobs_compute_every_token(self, warm: Harness) -> None:
        request = warm.add(PREFIX, max_tokens=2, prompt_logprobs=1)
        warm.step()
        assert (counts(warm), request.num_cached_tokens) == ([40], 0)
        warm.run()
        assert warm.cache.stats().prefix_queries_tokens == 40, "nothing was looked up"

    def test_switched_off_nothing_is_found(self) -> None:
        harness = Harness(num_blocks=100, block_size=4)
        requests = [harness.add(PREFIX, max_tokens=2) for _ in range(3)]
        finish(harness, *requests)
        assert harness.executor.num_computed == 3 * 41
        stats = harness.cache.stats()
        assert (stats.cached_blocks, stats.prefix_queries_tokens, stats.prefix_hits_tokens) == (0, 0, 0)

    def test_branches_share_what_was_found(self, warm: Harness) -> None:
        group = warm.add([*PREFIX, 5, 6], n=3, max_tokens=8, ignore_eos=True)
        warm.step()
        assert (counts(warm), group.num_cached_tokens) == ([2], 40)
        whole = warm.add(PREFIX, n=3, max_tokens=8, ignore_eos=True)
        warm.step()
        assert (counts(warm), whole.num_cached_tokens) == ([1, 1, 1, 1], 39)
        warm.run()

    def test_queries_and_hits_count_the_tokens_of_each_prompt_once(self, warm: Harness) -> None:
        warm.add([*PREFIX, 1, 2], n=2, max_tokens=3)
        warm.add([7, 7], max_tokens=3)
        warm.run()
        stats = warm.cache.stats()
        assert (stats.prefix_queries_tokens, stats.prefix_hits_tokens) == (40 + 42 + 2, 40)


class TestWaitingForEachOther:
    def test_burst_computes_its_prefix_once(self) -> None:
        harness = harness_of(num_blocks=200, max_num_seqs=32, budget=64)
        requests = [harness.add([*PREFIX, token], max_tokens=4, ignore_eos=True) for token in range(32)]
        harness.step()
        assert (admitted(harness), counts(harness)) == ([0], [41])
        harness.step()
        assert (admitted(harness), sum(counts(harness))) == (list(range(1, 32)), 1 + 31)
        finish(harness, *requests)
        assert harness.executor.num_computed == 40 + 32 + 32 * 3
        assert [request.num_cached_tokens for request in requests] == [0] + [40] * 31

    def test_others_go_past_those_who_wait(self) -> None:
        harness = harness_of(budget=64)
        same = [harness.add([*PREFIX, token], max_tokens=4) for token in range(2)]
        other = harness.add([3] * 10, max_tokens=4)
        harness.step()
        assert admitted(harness) == [0, 2]
        harness.step()
        assert admitted(harness) == [1]
        assert [request.request_id for request in harness.scheduler.queues.running] == [0, 1, 2], "in order of arrival"
        finish(harness, *same, other)

    def test_nobody_past_those_who_wait_takes_their_seats(self) -> None:
        harness = harness_of(budget=64, max_num_seqs=4)
        sharing = [harness.add([*PREFIX, number], max_tokens=6, ignore_eos=True) for number in range(3)]
        others = [harness.add(8, max_tokens=6, ignore_eos=True) for _ in range(2)]
        harness.step()
        assert admitted(harness) == [0, 3], "one seat is left over"
        harness.step()
        assert admitted(harness) == [1, 2]
        finish(harness, *sharing, *others)

    def test_who_waited_is_preempted_after_who_went_past(self) -> None:
        """The first in order is never preempted, and later arrivals are preempted first."""
        harness = harness_of(num_blocks=26, budget=64)
        first = harness.add([*PREFIX, 1], max_tokens=30, ignore_eos=True)
        waited = harness.add([*PREFIX, 2], max_tokens=30, ignore_eos=True)
        past = harness.add([3] * 10, max_tokens=30, ignore_eos=True)
        while not past.num_preemptions:
            harness.step()
        assert (first.num_preemptions, waited.num_preemptions) == (0, 0)
        finish(harness, first, waited, past)

    def test_long_prompt_is_shared_chunk_by_chunk(self) -> None:
        harness = harness_of(budget=16)
        requests = [harness.add([*PREFIX, token], max_tokens=2) for token in range(3)]
        harness.run()
        assert harness.executor.num_computed == 41 + 1 + 1 + 3
        finish(harness, *requests)

    def test_owner_that_ends_leaves_the_prefix_to_the_next(self) -> None:
        harness = harness_of(budget=64)
        first, second, third = (harness.add([*PREFIX, token], max_tokens=4, ignore_eos=True) for token in range(3))
        plan = harness.scheduler.schedule()
        harness.scheduler.abort(first.request_id)
        harness.executor.submit(plan)
        harness.scheduler.update(plan, harness.executor.collect())
        harness.check()
        harness.step()
        assert (admitted(harness), counts(harness)) == ([1], [41])
        finish(harness, second, third)

    def test_failed_step_leaves_the_prefix_to_the_next(self) -> None:
        harness = harness_of(budget=64)
        requests = [harness.add([*PREFIX, token], max_tokens=4) for token in range(3)]
        harness.scheduler.schedule()
        harness.scheduler.roll_back()
        harness.check()
        assert harness.cache.stats().free_blocks == 100
        harness.step()
        assert (admitted(harness), counts(harness)) == ([0], [41])
        finish(harness, *requests)

    def test_other_salts_do_not_wait(self) -> None:
        harness = harness_of(budget=100)
        for salt in ("a", "b"):
            harness.add(PREFIX, max_tokens=4, salt=salt)
        harness.step()
        assert admitted(harness) == [0, 1]
        harness.run()


class TestPreemption:
    def test_preempted_request_finds_what_it_had_computed(self) -> None:
        harness = harness_of(num_blocks=16, budget=64)
        first = harness.add(8, max_tokens=40, ignore_eos=True)
        victim = harness.add(12, max_tokens=40, ignore_eos=True)
        while not victim.num_preemptions:
            harness.step()
        assert harness.scheduler.abort(first.request_id)
        harness.step()
        assert admitted(harness) == [victim.request_id]
        assert counts(harness)[0] <= 8, "all was there but the block in which it ended, and one that was needed"
        recomputed = harness.scheduler.preemption.stats.num_recomputed_tokens
        assert recomputed == counts(harness)[0] - 1 < victim.live[0].num_tokens - 20
        finish(harness, victim)

    def test_recomputed_tokens_are_those_that_were_lost(self) -> None:
        harness = Harness(num_blocks=16, block_size=4, budget=64)
        first = harness.add(8, max_tokens=40, ignore_eos=True)
        victim = harness.add(12, max_tokens=40, ignore_eos=True)
        while not victim.num_preemptions:
            harness.step()
        assert harness.scheduler.preemption.stats.num_recomputed_tokens == 0, "not yet"
        num_computed = victim.live[0].num_tokens - 1
        harness.scheduler.abort(first.request_id)
        harness.step()
        assert harness.scheduler.preemption.stats.num_recomputed_tokens == num_computed
        finish(harness, victim)

    @pytest.mark.parametrize("caching", [False, True])
    def test_work_done_twice_is_what_the_counter_says(self, caching: bool) -> None:
        """Over a whole run: tokens computed are those that a request needed, and those counted as recomputed."""
        harness = Harness(num_blocks=24, block_size=4, max_num_seqs=32, caching=caching)
        requests = [harness.add(8, max_tokens=40, ignore_eos=True) for _ in range(12)]
        finish(harness, *requests)
        needed = sum(8 + 40 - 1 - request.num_cached_tokens for request in requests)
        preemption = harness.scheduler.preemption.stats
        assert preemption.num_preemptions["recompute"] > 0
        found_whole = harness.executor.num_computed - needed - preemption.num_recomputed_tokens
        assert 0 <= found_whole <= preemption.num_preemptions["recompute"]

    def test_branches_of_a_preempted_group_find_their_own_ways(self) -> None:
        harness = harness_of(num_blocks=40, budget=64)
        group = harness.add(10, n=3, max_tokens=20, ignore_eos=True)
        for _ in range(12):
            harness.step()
        harness.scheduler.planner.preempt(PlanBuilder(), group)
        harness.check()
        harness.step()
        assert all(sequence.num_output_tokens == 13 for sequence in group.live), "one token each, in the first step"
        assert sum(counts(harness)) <= 3 * 4
        finish(harness, group)

    def test_group_whose_prompt_is_gone_computes_it_once(self) -> None:
        harness = harness_of(num_blocks=40, budget=64)
        group = harness.add(10, n=3, max_tokens=20, ignore_eos=True)
        for _ in range(5):
            harness.step()
        harness.scheduler.planner.preempt(PlanBuilder(), group)
        harness.cache.create(10**6)
        harness.cache.append(10**6, 160)  # evicts everything
        harness.cache.free(10**6)
        harness.step()
        assert counts(harness) == [10]
        finish(harness, group)


class TestRoom:
    def test_what_others_hold_takes_no_room(self) -> None:
        """40 tokens of prefix are ten blocks: 18 are enough for three requests of 41 tokens, and head-room."""
        harness = harness_of(num_blocks=18, budget=64)
        requests = [harness.add([*PREFIX, token], max_tokens=4, ignore_eos=True) for token in range(3)]
        harness.step()
        harness.step()
        assert len(harness.scheduler.queues.running) == 3
        finish(harness, *requests)

    def test_cached_blocks_are_room_for_others(self, warm: Harness) -> None:
        request = warm.add([7] * 300, max_tokens=100, ignore_eos=True)
        warm.run()
        assert request.num_preemptions == 0
        assert warm.cache.stats().evicted_blocks > 0

    def test_copy_that_does_not_fit_is_left_out(self) -> None:
        """A pool of just what the request needs: there is no block to hold the source as well."""
        harness = harness_of(num_blocks=10, budget=64)
        finish(harness, harness.add(PREFIX[:36], max_tokens=1))
        request = harness.add([*PREFIX[:34], 49], max_tokens=5, ignore_eos=True)
        harness.step()
        assert request.num_cached_tokens == 32
        finish(harness, request)


def test_request_with_the_tokens_of_a_running_one_takes_a_block_where_it_writes_and_no_other() -> None:
    """A fork is such a request: it waits without a block, and shares all that the other has filled."""
    harness = harness_of(budget=64)
    parent = harness.add(PREFIX, max_tokens=40, ignore_eos=True)
    for _ in range(11):
        harness.step()
    known = list(parent.live[0].token_ids)
    num_free = harness.cache.num_free_blocks
    forks = [harness.add(known[:length], max_tokens=3, ignore_eos=True) for length in (43, 45, 51)]
    assert harness.cache.num_free_blocks == num_free, "they wait"
    parent_grows = harness.cache.num_tokens(parent.live[0].seq_id) % 4 == 0
    harness.step()
    assert admitted(harness) == [fork.request_id for fork in forks]
    assert num_free - harness.cache.num_free_blocks == len(forks) + parent_grows
    assert all(fork.num_cached_tokens >= length // 4 * 4 for fork, length in zip(forks, (43, 45, 50), strict=True))
    finish(harness, parent, *forks)
