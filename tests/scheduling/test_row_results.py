"""Results of any number of tokens per row: sequences come to what single steps give, and nothing is lost."""

import pytest

from quire.core.plan import RowResult, StepPlan, StepResult
from support.ragged_executor import RaggedExecutor
from support.scheduling import Harness, random_run


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("first_seed", range(0, 100, 25))
def test_random_runs_with_ragged_results_are_safe_live_and_right(first_seed: int, crowded: bool) -> None:
    seeds = range(first_seed, first_seed + 13)
    runs = [random_run(seed, crowded=crowded, executor_class=RaggedExecutor) for seed in seeds]
    assert sum(harness.executor.num_accepted for harness in runs) > 0
    assert sum(harness.executor.num_late for harness in runs) > 0
    assert sum(harness.executor.num_drafted - harness.executor.num_accepted for harness in runs) > 0
    assert sum(sum(harness.scheduler.preemption.stats.num_preemptions.values()) for harness in runs) > 0


@pytest.mark.parametrize("seed", range(6))
def test_sequences_end_where_their_rows_say(seed: int) -> None:
    harness = Harness(num_blocks=60, executor_class=RaggedExecutor)
    harness.executor.end_rate = 0.5
    requests = [harness.add(3 + seed + i, max_tokens=30, n=1 + i % 2, ignore_eos=True) for i in range(6)]
    harness.run()
    for request in requests:
        harness.assert_right(request, whole=False)
    assert set(harness.reasons.values()) >= {"stop"}
    assert len(harness.reasons) == sum(request.params.n for request in requests)


def first_plan(harness: Harness) -> tuple[StepPlan, int]:
    """The plan that computes the whole prompt of one request, and its row."""
    plan = harness.schedule()
    assert len(plan.sample_rows) == 1
    return plan, plan.sample_rows[0]


def answer(harness: Harness, plan: StepPlan, row: int, own: RowResult) -> list[tuple[list[int], str | None]]:
    """Give a plan of one row this result; return what became of the sequence."""
    deltas = harness.scheduler.update(plan, StepResult([9] * len(plan.sample_rows), rows={row: own}))
    harness.check()
    return [(delta.token_ids, delta.finish_reason) for delta in deltas]


@pytest.mark.parametrize(
    ("params", "told", "given", "reason"),
    [
        ({"max_tokens": 9}, [4, 5, 6], [4, 5, 6], None),
        ({"max_tokens": 2}, [4, 5, 6], [4, 5], "length"),
        ({"max_tokens": 9, "stop_token_ids": [5]}, [4, 5, 6], [4, 5], "stop"),
        ({"max_tokens": 9, "stop_token_ids": [5], "min_tokens": 3}, [4, 5, 6, 5, 7], [4, 5, 6, 5], "stop"),
        ({"max_tokens": 9}, [4, 0, 6], [4, 0], "stop"),
        ({"max_tokens": 9, "ignore_eos": True}, [4, 0, 6], [4, 0, 6], None),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_forced", [0, 2])
def test_tokens_of_a_row_are_checked_one_by_one(
    params: dict[str, object], told: list[int], given: list[int], reason: str | None, num_forced: int
) -> None:
    harness = Harness(num_blocks=20)
    request = harness.add(5, eos=[0], **params)
    plan, row = first_plan(harness)
    num_drawn = len(told) - num_forced
    own = RowResult(told[:num_drawn], forced=told[num_drawn:])
    assert answer(harness, plan, row, own) == [(given, reason)]
    if reason is not None:
        assert not harness.scheduler.has_requests
        harness.assert_empty()
    else:
        assert harness.schedule().counts == [len(given)]
        assert request.live[0].num_output_tokens == len(given)


def test_forced_tokens_are_computed_as_a_chunk_and_sampled_behind() -> None:
    harness = Harness(num_blocks=20)
    request = harness.add(5, max_tokens=9, ignore_eos=True)
    plan, row = first_plan(harness)
    assert answer(harness, plan, row, RowResult([], forced=[7, 8, 9])) == [([7, 8, 9], None)]
    plan = harness.schedule()
    assert (plan.starts, plan.counts, plan.sample_tokens, plan.drafts) == ([5], [3], [2], [])
    assert request.live[0].token_ids.output == [7, 8, 9]


def test_row_of_no_token_that_has_ended_stops() -> None:
    harness = Harness(num_blocks=20)
    harness.add(5, max_tokens=9)
    plan, row = first_plan(harness)
    assert answer(harness, plan, row, RowResult(has_ended=True)) == [([], "stop")]
    harness.assert_empty()


def test_pooled_vector_rides_on_the_delta() -> None:
    harness = Harness(num_blocks=20)
    harness.add(5, max_tokens=9)
    plan, row = first_plan(harness)
    own = RowResult(has_ended=True, pooled=b"\0\0\x80\x3f")
    (delta,) = harness.scheduler.update(plan, StepResult([9], rows={row: own}))
    assert (delta.pooled, delta.finish_reason) == (own.pooled, "stop")


def test_chunk_of_a_prompt_that_was_computed_in_part_goes_on_from_there() -> None:
    harness = Harness(num_blocks=20, caching=True)
    harness.add(40, max_tokens=2, ignore_eos=True)
    plan = harness.schedule()
    assert (plan.counts, plan.sample_rows) == ([16], [])
    harness.scheduler.update(plan, StepResult([], rows={plan.rows[0]: RowResult(num_computed=5)}))
    harness.check()
    plan = harness.schedule()
    assert (plan.starts, plan.counts) == ([5], [16])


def test_chunk_that_the_step_in_flight_continues_is_computed_whole() -> None:
    harness = Harness(num_blocks=20)
    harness.add(40, max_tokens=2, ignore_eos=True)
    plan = harness.schedule()
    assert harness.scheduler.schedule_next() is not None
    with pytest.raises(AssertionError, match="the step in flight needs all planned tokens"):
        harness.scheduler.update(plan, StepResult([], rows={plan.rows[0]: RowResult(num_computed=5)}))


@pytest.mark.parametrize("length", [5, 8], ids=["inside of a block", "end of a block"])
@pytest.mark.parametrize("caching", [False, True])
def test_late_rows_are_computed_again_for_their_logits_alone(length: int, caching: bool) -> None:
    """The branches that have just forked, too: no block is taken, copied or given back for it."""
    harness = Harness(num_blocks=20, caching=caching)
    request = harness.add(length, n=3, max_tokens=9, ignore_eos=True)
    plan = harness.schedule()
    assert len(plan.sample_rows) == 3
    num_free = harness.cache.num_free_blocks
    rows = {row: RowResult(is_late=True) for row in plan.sample_rows[:2]}
    (delta,) = harness.scheduler.update(plan, StepResult([9] * 3, rows=rows))
    harness.check()
    assert (delta.index, delta.token_ids, harness.cache.num_free_blocks) == (2, [9], num_free)
    plan = harness.schedule()
    assert (plan.starts, plan.counts) == ([length - 1, length - 1, length], [1, 1, 1])
    assert plan.stored_entries == [0, 1]
    rows = {row: RowResult(is_late=True) for row in plan.sample_rows[:1]}
    harness.scheduler.update(plan, StepResult([9] * 3, rows=rows))
    harness.check()
    assert [sequence.num_output_tokens for sequence in request.live] == [0, 1, 2]
    plan = harness.schedule()
    assert (plan.starts, plan.stored_entries) == ([length - 1, length, length + 1], [0])


def test_drafts_are_computed_behind_the_known_tokens_and_sampled_at_each() -> None:
    harness = Harness(num_blocks=20)
    request = harness.add(5, max_tokens=9, ignore_eos=True)
    plan, row = first_plan(harness)
    assert answer(harness, plan, row, RowResult([4], drafts=[5, 6, 7])) == [([4], None)]
    plan = harness.schedule()
    assert (plan.starts, plan.counts) == ([5], [4])
    assert (plan.sample_rows, plan.sample_tokens) == ([row] * 4, [0, 1, 2, 3])
    assert [tuple(each) for each in plan.drafts] == [(row, 6, [5, 6, 7])]
    assert harness.cache.num_tokens(request.live[0].seq_id) == 9
    assert answer(harness, plan, row, RowResult([5, 9], num_computed=2)) == [([5, 9], None)]
    assert harness.cache.num_tokens(request.live[0].seq_id) == 7
    plan = harness.schedule()
    assert (plan.starts, plan.counts, plan.drafts) == ([7], [1], [])


def test_no_more_is_drafted_than_max_tokens_leaves() -> None:
    harness = Harness(num_blocks=20)
    harness.add(5, max_tokens=3, ignore_eos=True)
    plan, row = first_plan(harness)
    answer(harness, plan, row, RowResult([4], drafts=[5, 6, 7]))
    plan = harness.schedule()
    assert [each.token_ids for each in plan.drafts] == [[5]]
    assert answer(harness, plan, row, RowResult([5, 6])) == [([5, 6], "length")]
    harness.assert_empty()


@pytest.mark.parametrize(
    ("num_seqs", "budget", "num_blocks", "max_tokens"),
    [(2, 2, 20, 9), (1, 16, 1, 2)],
    ids=["of the budget", "of blocks"],
)
def test_drafts_are_dropped_for_want(num_seqs: int, budget: int, num_blocks: int, max_tokens: int) -> None:
    """Each sequence gets the token that it gets without them, and none is preempted for a draft."""
    harness = Harness(num_blocks=num_blocks, budget=budget)
    requests = [harness.add(2, max_tokens=max_tokens, ignore_eos=True) for _ in range(num_seqs)]
    plan = harness.schedule()
    while len(plan.sample_rows) < num_seqs:
        harness.execute(plan)
        plan = harness.schedule()
    for request in requests:
        request.max_tokens = 16
    own = {row: RowResult([4], drafts=[5] * 9) for row in plan.sample_rows}
    harness.scheduler.update(plan, StepResult([9] * num_seqs, rows=own))
    assert all(request.live[0].drafts for request in requests)
    plan = harness.schedule()
    assert (plan.counts, plan.drafts) == ([1] * num_seqs, [])
    assert not any(request.num_preemptions for request in requests)
    assert not any(request.live[0].drafts for request in requests)


def drafting(harness: Harness, num_seqs: int, num_drafts: int = 3) -> list[int]:
    """Run sequences of two prompt tokens up to where each has drafts for the next step; return their rows."""
    for _ in range(num_seqs):
        harness.add(2, max_tokens=30, ignore_eos=True)
    plan = harness.schedule()
    rows = {row: RowResult([4], drafts=[5] * num_drafts) for row in plan.sample_rows}
    assert len(rows) == num_seqs
    harness.scheduler.update(plan, StepResult([9] * num_seqs, rows=rows))
    return list(rows)


def test_drafts_share_the_budget_that_is_left_in_the_order_of_sequences() -> None:
    harness = Harness(num_blocks=20, budget=6)
    rows = drafting(harness, 2)
    plan = harness.schedule()
    assert plan.counts == [4, 2]
    assert (plan.sample_rows, plan.sample_tokens) == ([rows[0]] * 4 + [rows[1]] * 2, [0, 1, 2, 3, 4, 5])
    assert [tuple(each) for each in plan.drafts] == [(rows[0], 3, [5, 5, 5]), (rows[1], 3, [5])]


@pytest.mark.parametrize(
    ("prompt", "counts"), [(4, [4, 2, 4]), (6, [3, 1, 6]), (30, [1, 1, 8])], ids=["all", "some", "none"]
)
def test_waiting_requests_have_the_budget_before_drafts(prompt: int, counts: list[int]) -> None:
    harness = Harness(num_blocks=20, budget=10)
    drafting(harness, 2)
    harness.add(prompt, max_tokens=9, n=2, ignore_eos=True)
    plan = harness.schedule()
    assert sum(counts) == 10
    assert plan.counts == counts


def test_no_drafts_while_a_request_waits_for_the_budget() -> None:
    harness = Harness(num_blocks=20, budget=4)
    drafting(harness, 2)
    for _ in range(3):
        harness.add(1, max_tokens=9, ignore_eos=True)
    plan = harness.schedule()
    assert (plan.counts, plan.drafts) == ([1, 1, 1, 1], [])
    assert harness.scheduler.queues.wait_reasons.current == "token_budget"


def test_samples_of_forks_and_drafts_are_behind_their_tokens() -> None:
    """A prompt with two branches is computed beside drafts: its entry begins behind them."""
    harness = Harness(num_blocks=20, budget=16)
    rows = drafting(harness, 2)
    request = harness.add(3, max_tokens=9, n=2, ignore_eos=True)
    plan = harness.schedule()
    assert plan.counts == [4, 4, 3]
    branches = [sequence.row for sequence in request.live]
    assert plan.sample_rows == [rows[0]] * 4 + [rows[1]] * 4 + branches
    assert plan.sample_tokens == [*range(8), 10, 10]


def test_drafts_see_the_window_of_the_token_before_them() -> None:
    """No block is released for a draft; after accepted drafts the next step releases what they no longer need."""
    harness = Harness(num_blocks=20, block_size=2, window=4)
    request = harness.add(5, max_tokens=30, ignore_eos=True)
    plan, row = first_plan(harness)
    answer(harness, plan, row, RowResult([4], drafts=[5, 6, 7]))
    plan = harness.schedule()
    sequence = request.live[0].seq_id
    assert plan.counts == [4]
    assert harness.cache.block_ids(sequence)[:2] == [-1, harness.cache.block_ids(sequence)[1]]
    assert -1 not in harness.cache.block_ids(sequence)[1:]      # position 5 sees positions 2 to 5
    answer(harness, plan, row, RowResult([5, 6, 7, 8], num_computed=4))
    harness.schedule()
    assert harness.cache.block_ids(sequence)[:3] == [-1, -1, -1]    # position 9 sees positions 6 to 9


@pytest.mark.parametrize("first_seed", range(0, 60, 20))
def test_random_runs_with_windows_and_ragged_results_are_safe_live_and_right(first_seed: int) -> None:
    runs = [
        random_run(seed, windowed=True, crowded=seed % 2 == 0, executor_class=RaggedExecutor)
        for seed in range(first_seed, first_seed + 20)
    ]
    windowed = [harness for harness in runs if harness.window is not None]
    assert sum(harness.executor.num_accepted for harness in windowed) > 0
    assert sum(harness.executor.num_drafted - harness.executor.num_accepted for harness in windowed) > 0


def test_tokens_behind_uncomputed_ones_are_a_fault() -> None:
    harness = Harness(num_blocks=20)
    harness.add(5, max_tokens=9)
    plan, row = first_plan(harness)
    with pytest.raises(AssertionError, match="uncomputed"):
        harness.scheduler.update(plan, StepResult([9], rows={row: RowResult([4], num_computed=3)}))

