"""Beam search: the selection by itself, against a search that cuts nothing short, and in the scheduler's step."""

import random
from collections.abc import Callable
from itertools import product

import pytest

from quire.cache.block_table import worst_case_blocks
from quire.core import pooling
from quire.core.deltas import TokenLogprobs
from quire.core.sampling_params import BeamSearchParams, num_candidates
from quire.core.sequence import Sequence
from quire.core.token_ids import TokenIds, pack_tokens
from quire.scheduling.beam_search import BeamSearch
from support.beam_reference import Found, reference_search
from support.fake_executor import VOCAB_SIZE
from support.scheduling import Harness

PROMPT = pack_tokens([7])
PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)
Logprobs = Callable[[list[int]], list[float]]


def random_logprobs(vocab_size: int, seed: int, num_steps: int = 1 << 20) -> Logprobs:
    """Logprobs that a prefix decides; with few steps many are equal."""
    return lambda prefix: [
        -(hash((seed, *prefix, token)) % num_steps) * 4 / num_steps for token in range(vocab_size)
    ]


def searched(logprobs: Logprobs, params: BeamSearchParams, max_tokens: int, eos: frozenset[int]) -> list[Found]:
    """What the selection comes to, with lists of tokens for a cache."""
    search = BeamSearch(params, max_tokens, eos)
    branches = [Sequence(index, index, 0, TokenIds(PROMPT), 1) for index in range(params.beam_width)]
    num_rounds = 0
    while True:
        for index in search.logprobs:
            assert not search.has_all_answers
            output = branches[index].token_ids.output
            search.answer(index, candidates(logprobs(output), num_candidates(params, len(eos))))
        assert search.has_all_answers
        survivors = search.advance(branches)
        num_rounds += 1
        assert num_rounds <= max_tokens
        if not survivors:
            return [Found(each.token_ids, each.logprob, each.score, each.finish_reason) for each in search.hypotheses]
        placed = search.place(survivors)
        parents = [branch.token_ids.output for branch in branches]
        assert len({index for index, _ in placed}) == len(placed)
        for index, each in placed:
            branches[index].token_ids = TokenIds(PROMPT, [*parents[each.beam], each.token_id])


def candidates(logprobs: list[float], count: int) -> TokenLogprobs:
    ranked = sorted(range(len(logprobs)), key=lambda token: -logprobs[token])
    ids = [ranked[0], *ranked[:count]]
    return TokenLogprobs(ids, [logprobs[token] for token in ids], [1, *range(1, len(ids))])


@pytest.mark.parametrize("length_penalty", PENALTIES)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 6])
def test_selection_equals_a_search_that_cuts_nothing_short(width: int, length_penalty: float) -> None:
    params, ends = BeamSearchParams(width, 1, length_penalty=length_penalty), set()
    for seed, max_tokens, num_eos in product(range(6), (1, 2, 9), (0, 1, 3)):
        logprobs, eos = random_logprobs(20, seed), frozenset(range(4, 4 + num_eos))
        found = searched(logprobs, params, max_tokens, eos)
        assert found == reference_search(logprobs, params, max_tokens, eos)
        assert len(found) == width
        ends |= {each.finish_reason for each in found}
    assert ends == {"stop", "length"}


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 5])
def test_a_tiny_vocabulary_gives_as_many_answers_as_beams(vocab_size: int) -> None:
    """Fewer beams than the width at first; every token may be one that ends."""
    for width, num_eos, seed in product(range(1, vocab_size + 1), range(vocab_size + 1), range(4)):
        params, eos = BeamSearchParams(width, 1), frozenset(range(num_eos))
        for max_tokens in (1, 2, 6):
            logprobs = random_logprobs(vocab_size, seed)
            found = searched(logprobs, params, max_tokens, eos)
            assert found == reference_search(logprobs, params, max_tokens, eos)
            assert len({tuple(each.token_ids) for each in found}) == width


def test_of_equal_continuations_the_better_beam_and_the_lower_token_come_first() -> None:
    for seed, width in product(range(10), (2, 4)):
        logprobs, params = random_logprobs(9, seed, num_steps=3), BeamSearchParams(width, 1)
        found = searched(logprobs, params, 5, frozenset({2}))
        assert found == reference_search(logprobs, params, 5, frozenset({2}))


def test_search_goes_on_while_a_beam_may_become_better_than_the_worst_answer() -> None:
    """Two answers after two tokens; the beam that is left beats the worse of them only where length is no burden."""
    table = {(): [-1.0, -0.5, -9.0], (1,): [-0.1, -0.2, -9.0], (1, 1): [-0.1, -0.2, -9.0]}

    def logprobs(prefix: list[int]) -> list[float]:
        return table.get(tuple(prefix), [-5.0, -5.0, -5.0])

    lengths = {}
    for penalty in (-1.0, 0.0, 2.0):
        found = searched(logprobs, BeamSearchParams(2, 1, length_penalty=penalty), 6, frozenset({0}))
        lengths[penalty] = [len(each.token_ids) for each in found]
        assert [each.score for each in found] == sorted((each.score for each in found), reverse=True)
    assert lengths == {-1.0: [1, 2], 0.0: [2, 3], 2.0: [3, 2]}


# --- in the step ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("budget", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_searches_samples_and_greedy_requests_share_steps(width: int, budget: int, caching: bool) -> None:
    harness = Harness(num_blocks=200, block_size=4, max_num_seqs=16, budget=budget, caching=caching)
    for penalty in (0.0, 1.0):
        beam = BeamSearchParams(width, 12, length_penalty=penalty)
        harness.add_beams(9, beam, eos={3})
        harness.add(6, n=2, max_tokens=9)
        harness.add(3, max_tokens=15, temperature=0.0)
    harness.run()
    for request in harness.requests.values():
        harness.assert_right(request)


def test_small_budget_lets_some_beams_wait_and_plans_nothing_for_them() -> None:
    harness = Harness(num_blocks=40, block_size=4, budget=3)
    request = harness.add_beams(3, BeamSearchParams(4, 5))
    harness.step()
    counts = []
    while harness.scheduler.has_requests:
        harness.step()
        counts.append(harness.executor.trace[-1][2])
    assert counts == [[1, 1, 1], [1]] * 4
    harness.assert_right(request)


@pytest.mark.parametrize("is_run", [False, True], ids=["not run", "result lost"])
@pytest.mark.parametrize("caching", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("failing", range(14))
def test_lost_step_between_any_two_answers_changes_nothing(failing: int, caching: bool, is_run: bool) -> None:
    harness = Harness(num_blocks=40, block_size=4, budget=3, caching=caching)
    request = harness.add_beams(5, BeamSearchParams(4, 6), eos={3})
    for _ in range(failing):
        harness.step()
    harness.fail_step(is_run=is_run)
    harness.run()
    assert request.num_preemptions == (1 if failing < harness.num_steps else 0)
    harness.assert_right(request)


@pytest.mark.parametrize("caching", [False, True], ids=["no cache", "cache"])
def test_preempted_search_comes_back_with_the_tokens_of_every_beam(caching: bool) -> None:
    harness = Harness(num_blocks=22, block_size=2, budget=5, caching=caching)
    first = harness.add(4, n=2, max_tokens=19)
    for _ in range(5):
        harness.step()
    beams = harness.add_beams(6, BeamSearchParams(3, 9))
    while not beams.num_preemptions:
        known = [list(sequence.token_ids) for sequence in beams.live]
        harness.step()
    assert [sequence.token_ids for sequence in beams.live] == known
    assert {len(tokens) for tokens in known} != {6}, "thrown out before the search had got anywhere"
    harness.run()
    for request in (first, beams):
        harness.assert_right(request)


def test_beams_are_not_forked_before_all_is_computed() -> None:
    """Known answers, from before a preemption, are not enough: the keys of every beam have to be there again."""
    harness = Harness(num_blocks=60, block_size=4, budget=1)
    request = harness.add_beams(3, BeamSearchParams(2, 9))
    while request.live[0].num_tokens < 5 or not request.live[0].is_computed:
        harness.step()
    known = [list(sequence.token_ids) for sequence in request.live]
    searches = harness.scheduler._searches
    for sequence in request.live:
        searches.answer(request, sequence, candidates(harness.executor.next_logprobs(sequence.token_ids), 2))
    assert searches.advance(request) == []
    assert [sequence.token_ids for sequence in request.live] == known
    harness.run()
    harness.assert_right(request)


@pytest.mark.parametrize("failing", range(0, 20, 3))
@pytest.mark.parametrize(("budget", "caching"), [(2, False), (2, True), (64, True)])
def test_tiny_vocabulary_leaves_sequences_without_a_beam_for_a_while(failing: int, budget: int, caching: bool) -> None:
    harness = Harness(num_blocks=60, block_size=2, budget=budget, caching=caching)
    harness.executor.next_logprobs = random_logprobs(3, 5)
    request = harness.add_beams([0, 1, 2, 1, 0], BeamSearchParams(3, 7), eos={1})
    for _ in range(failing):
        harness.step()
    harness.fail_step(is_run=True)
    harness.run()
    assert len(harness.searched(request)) == 3
    harness.assert_right(request)


@pytest.mark.parametrize("num_steps", range(12))
def test_aborted_search_leaves_nothing_behind(num_steps: int) -> None:
    harness = Harness(num_blocks=60, block_size=4, budget=7)
    beams, other = harness.add_beams(9, BeamSearchParams(4, 20)), harness.add(5, max_tokens=20)
    for _ in range(num_steps):
        harness.step()
    assert harness.scheduler.abort(beams.request_id)
    harness.check()
    harness.run()
    harness.assert_right(other)
    assert (beams.request_id, 0) not in harness.outputs


def test_search_that_is_aborted_while_its_step_runs_takes_no_answers() -> None:
    harness = Harness(num_blocks=60, block_size=4)
    beams = harness.add_beams(9, BeamSearchParams(4, 20))
    for _ in range(3):
        harness.step()
    plan = harness.scheduler.schedule()
    harness.executor.submit(plan)
    harness.scheduler.abort(beams.request_id)
    assert harness.scheduler.update(plan, harness.executor.collect()) == []
    harness.check()
    assert not harness.scheduler.has_requests


def test_single_beam_cannot_be_finished_from_outside() -> None:
    harness = Harness(num_blocks=60, block_size=4)
    request = harness.add_beams(9, BeamSearchParams(2, 5))
    harness.step()
    assert not harness.scheduler.finish(request.request_id, 1)
    harness.run()
    harness.assert_right(request)


def test_a_search_gives_its_answers_when_it_ends_and_one_delta_for_each() -> None:
    harness = Harness(num_blocks=60, block_size=4)
    request = harness.add_beams(9, BeamSearchParams(3, 5))
    deltas = []
    while harness.scheduler.has_requests:
        assert not deltas
        deltas = harness.step()
    assert [(delta.request_id, delta.index) for delta in deltas] == [(request.request_id, i) for i in range(3)]
    assert all(delta.finish_reason == "length" for delta in deltas)


def test_losers_go_before_survivors_grow_and_only_partial_blocks_are_copied() -> None:
    """At a border between blocks, nothing is copied; a loser's blocks are free at once, and not kept in the cache."""
    harness = Harness(num_blocks=60, block_size=4, caching=True)
    harness.add_beams(8, BeamSearchParams(4, 9))
    while harness.scheduler.has_requests:
        before = harness.cache.stats()
        harness.step()
        plan_copies, starts = harness.executor.trace[-1][3], harness.executor.trace[-1][1]
        if starts and starts[0] % 4 == 0:
            assert not plan_copies
        if harness.scheduler.has_requests:
            assert harness.cache.stats().cached_blocks == before.cached_blocks == 0


def test_no_token_list_is_sent_again_for_beams_that_go_on() -> None:
    harness = Harness(num_blocks=60, block_size=4)
    harness.add_beams(8, BeamSearchParams(4, 9))
    harness.step()
    while harness.scheduler.has_requests:
        plan = harness.scheduler.schedule()
        assert not plan.new_rows
        assert len(plan.row_forks) == 4
        assert all((len(fork.block_ids) > 0) == (fork.row != fork.source) for fork in plan.row_forks)
        harness.executor.submit(plan)
        harness.scheduler.update(plan, harness.executor.collect())


def test_random_searches_with_hardly_any_room() -> None:
    """A pool for the largest request alone: what shares little grows, and throws searches out again and again."""
    num_preemptions = 0
    for seed in range(20):
        rng = random.Random(seed)
        block_size, length = rng.choice([1, 2, 4]), rng.randint(1, 8)
        harness = Harness(
            num_blocks=worst_case_blocks(length, 14, 4, block_size),
            block_size=block_size,
            max_num_seqs=32,
            budget=rng.choice([2, 5, 30]),
            window=rng.choice([None, None, 5]),
            caching=rng.random() < 0.5,
        )
        for width in (2, 3, 4):
            harness.add(length, n=4, max_tokens=14)
            harness.add_beams(length, BeamSearchParams(width, 14), eos=rng.sample(range(VOCAB_SIZE), rng.randint(0, 1)))
        harness.run()
        for request in harness.requests.values():
            harness.assert_right(request)
            num_preemptions += request.num_preemptions if isinstance(request.task, pooling.BeamTask) else 0
    assert num_preemptions >= 10
