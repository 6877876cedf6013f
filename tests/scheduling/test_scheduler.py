"""The scheduler over the real cache, with an executor that checks every block it is told to read."""

import random

import numpy as np
import pytest

from quire.cache.block_table import BlockTable, TableUpdate
from quire.core.deltas import TokenLogprobs
from quire.core.errors import ContextLengthError, InvalidRequestError
from quire.core.logprob_table import LogprobTable
from quire.core.plan import PromptLogprobsChunk, StepResult
from quire.scheduling import admission
from quire.scheduling.plan_builder import PlanBuilder
from support.fuzz_seeds import STEPS_PER_RUN, fuzz
from support.scheduling import Harness, random_run


def test_one_request_is_computed_whole_then_token_by_token() -> None:
    harness = Harness(num_blocks=8, block_size=4)
    request = harness.add(7, max_tokens=3)
    plans = []
    while harness.scheduler.has_requests:
        harness.step()
        plans.append((harness.executor.trace[-1][1], harness.executor.trace[-1][2]))
    assert plans == [([0], [7]), ([7], [1]), ([8], [1])]
    harness.assert_right(request)


def test_prompt_chunks_share_steps_with_decodes() -> None:
    harness = Harness(num_blocks=40, block_size=4, budget=8)
    short = harness.add(3, max_tokens=10)
    harness.step()
    long = harness.add(30, max_tokens=2)
    harness.step()
    assert harness.executor.trace[-1][2] == [1, 7]
    harness.run()
    for request in (short, long):
        harness.assert_right(request)


def test_every_running_request_is_planned_before_a_waiting_one() -> None:
    harness = Harness(num_blocks=60, block_size=4, budget=4)
    for _ in range(6):
        harness.add(2, max_tokens=8)
    while harness.scheduler.has_requests:
        running = [r.request_id for r in harness.scheduler.queues.running]
        deltas = harness.step()
        planned = harness.executor.trace[-1][0]
        if harness.scheduler.step.admitted:
            assert len(planned) >= len(running), "someone was let in while a running request got nothing"
        assert [d.request_id for d in deltas] == sorted(d.request_id for d in deltas)


def test_budget_of_one_serves_in_order_of_arrival() -> None:
    harness = Harness(num_blocks=40, block_size=4, budget=1)
    first, second = harness.add(5, max_tokens=4), harness.add(5, max_tokens=4)
    ended = []
    while harness.scheduler.has_requests:
        ended += [d.request_id for d in harness.step() if d.finish_reason]
    assert ended == [first.request_id, second.request_id]


def test_step_never_exceeds_rows_or_budget() -> None:
    harness = Harness(num_blocks=200, block_size=4, budget=6, max_num_seqs=3)
    for _ in range(10):
        harness.add(4, max_tokens=5)
    while harness.scheduler.has_requests:
        harness.step()
        assert sum(len(r.live) for r in harness.scheduler.queues.running) <= 3


def test_group_computes_its_prompt_once_and_forks() -> None:
    harness = Harness(num_blocks=20, block_size=4)
    request = harness.add(10, n=4, max_tokens=5)
    harness.step()
    assert harness.executor.trace[-1][2] == [10]
    assert len(harness.executor.trace[-1][4]) == 4, "four first tokens from one row of logits"
    assert harness.num_blocks - harness.cache.num_free_blocks == 3
    harness.run()
    harness.assert_right(request)


@pytest.mark.parametrize(("prompt_len", "num_copies"), [(7, 3), (8, 0)], ids=["inside a block", "at a border"])
def test_forks_copy_the_block_in_which_the_prompt_ends(prompt_len: int, num_copies: int) -> None:
    harness = Harness(num_blocks=20, block_size=4)
    harness.add(prompt_len, n=4, max_tokens=3, ignore_eos=True)
    harness.run()
    assert sum(len(step[3]) for step in harness.executor.trace) == num_copies


def test_group_holds_its_seats() -> None:
    harness = Harness(num_blocks=100, block_size=4, max_num_seqs=4)
    harness.add(6, n=3, max_tokens=6, ignore_eos=True)
    harness.add(6, n=2, max_tokens=6, ignore_eos=True)
    harness.step()
    assert [r.request_id for r in harness.scheduler.queues.running] == [0], "two more do not fit beside three"
    harness.run()
    assert all(reason == "length" for reason in harness.reasons.values())


def test_latest_arrival_is_preempted_as_a_whole_and_comes_back_right() -> None:
    harness = Harness(num_blocks=12, block_size=4)
    first = harness.add(8, max_tokens=30, ignore_eos=True)
    second = harness.add(8, n=2, max_tokens=12, ignore_eos=True)
    preempted_at = None
    while harness.scheduler.has_requests:
        harness.step()
        if preempted_at is None and second.num_preemptions:
            preempted_at = harness.num_steps
            assert all(sequence.num_computed_tokens == 0 for sequence in second.live)
            assert harness.scheduler.queues.waiting[0] is second
    assert preempted_at is not None
    assert first.num_preemptions == 0
    for request in (first, second):
        harness.assert_right(request)


def test_preempted_group_shares_its_prompt_again() -> None:
    harness = Harness(num_blocks=11, block_size=4)
    harness.add(7, max_tokens=33, ignore_eos=True)
    group = harness.add(10, n=2, max_tokens=10, ignore_eos=True)
    while not group.num_preemptions:
        harness.step()
    known = [sequence.num_tokens for sequence in group.live]
    before = len(harness.executor.trace)
    harness.run()
    steps = harness.executor.trace[before:]
    rows = {row for rows, starts, *_ in steps for row, start in zip(rows, starts, strict=True) if start == 0}
    assert min(known) > 10, "the branches had tokens of their own"
    assert len(rows) == 1, "one branch computed the prompt, the other forked from it"
    harness.assert_right(group)


def test_recompute_is_one_prefill_of_all_known_tokens() -> None:
    """P-recompute: preempted at 7 prompt and 3 generated tokens, one prefill of 10."""
    harness = Harness(num_blocks=6, block_size=4, budget=32)
    harness.add(7, max_tokens=14, ignore_eos=True)
    victim = harness.add(7, max_tokens=14, ignore_eos=True)
    while not victim.num_preemptions:
        harness.step()
    num_known = victim.live[0].num_tokens
    while victim not in harness.scheduler.queues.running:
        harness.step()
    counts = dict(zip(harness.executor.trace[-1][0], harness.executor.trace[-1][2], strict=True))
    assert num_known in counts.values()
    harness.run()
    harness.assert_right(victim)


def test_decodes_that_give_way_in_the_middle_of_their_step_leave_nothing_in_its_plan() -> None:
    harness = Harness(num_blocks=8, block_size=4)
    requests = [harness.add(length, max_tokens=12, ignore_eos=True) for length in (4, 1, 2, 2)]
    plan = harness.schedule()
    while not harness.scheduler.step.preempted:
        harness.execute(plan)
        plan = harness.schedule()
    planned = [sequence for request in harness.scheduler.queues.running for sequence in request.live]
    assert plan.rows == plan.sample_rows == [sequence.row for sequence in planned]
    assert plan.starts == [sequence.num_computed_tokens for sequence in planned]
    assert plan.sample_tokens == list(range(len(planned)))
    harness.execute(plan)
    harness.run()
    for request in requests:
        harness.assert_right(request)


def test_first_in_order_is_never_preempted() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        harness = Harness(num_blocks=rng.randint(12, 20), block_size=2, max_num_seqs=8)
        for _ in range(6):
            harness.add(rng.randint(1, 6), max_tokens=rng.randint(1, 16), ignore_eos=True)
        first_preempted: list[int] = []
        while harness.scheduler.has_requests:
            first = harness.scheduler.queues.running[0] if harness.scheduler.queues.running else None
            before = first.num_preemptions if first else 0
            harness.step()
            first_preempted += [first.request_id] if first and first.num_preemptions > before else []
        assert not first_preempted


def test_head_room_keeps_admissions_from_thrashing() -> None:
    """A pool for about one and a half long generations: each request is preempted a bounded number of times."""
    harness = Harness(num_blocks=24, block_size=4, max_num_seqs=32)
    requests = [harness.add(8, max_tokens=56, ignore_eos=True) for _ in range(32)]
    harness.run()
    for request in requests:
        harness.assert_right(request)
        assert request.num_preemptions <= 4


@pytest.mark.parametrize(("block_size", "num_let_in"), [(8, 3), (16, 3), (32, 4), (128, 5)])
def test_large_blocks_are_not_kept_free_for_each_running_sequence(block_size: int, num_let_in: int) -> None:
    """Each of the requests takes one of 6 blocks; 16 tokens for each must be left, and one small block."""
    harness = Harness(num_blocks=6, block_size=block_size, max_num_seqs=6)
    for _ in range(6):
        harness.add(1, max_tokens=9, ignore_eos=True)
        harness.step()
    assert len(harness.scheduler.queues.running) == num_let_in
    harness.run()


def test_nobody_is_let_in_on_blocks_promised_to_a_returning_group() -> None:
    harness = Harness(num_blocks=15, block_size=4, budget=64)
    harness.add(4, max_tokens=30, ignore_eos=True)
    group = harness.add(4, n=2, max_tokens=20, ignore_eos=True)
    for _ in range(12):
        harness.step()
    assert [sequence.num_tokens for sequence in group.live] == [16, 16]
    harness.scheduler.planner.preempt(PlanBuilder(), group)
    late = harness.add(8, max_tokens=4, ignore_eos=True)
    harness.step()
    assert group in harness.scheduler.queues.running
    assert harness.cache.num_free_blocks >= 2 + 4, "late would fit, were nothing promised"
    assert late not in harness.scheduler.queues.running
    harness.run()
    for request in harness.requests.values():
        harness.assert_right(request)


def test_decoding_group_keeps_nobody_out_with_blocks_that_it_already_holds() -> None:
    harness = Harness(num_blocks=7, block_size=4)
    harness.add(5, n=2, max_tokens=6, ignore_eos=True)
    for _ in range(2):
        harness.step()
    assert harness.cache.num_free_blocks == 4, "one shared block and a tail for each branch are in use"
    late = harness.add(4, max_tokens=3, ignore_eos=True)
    harness.step()
    assert late in harness.scheduler.queues.running, "one block for its prompt, and one for each of three sequences"
    harness.run()
    for request in harness.requests.values():
        harness.assert_right(request)


def test_prompt_logprobs_that_come_again_are_not_taken_twice() -> None:
    harness = Harness(num_blocks=15, block_size=4, budget=4)
    request = harness.add(8, max_tokens=2, prompt_logprobs=0)
    scored = [TokenLogprobs([token], [-float(token)], [1]) for token in range(7)]  # blocks of positions 1 to 7
    for start, stop in ((1, 5), (1, 8)):
        plan = harness.scheduler.schedule()
        chunk = PromptLogprobsChunk(plan.rows[0], start, scored[start - 1 : stop - 1])
        sampled = [9] * len(plan.sample_rows)
        deltas = harness.scheduler.update(plan, StepResult(sampled, prompt_logprobs=[chunk]))
    assert request.prompt_logprobs == LogprobTable.of(scored)
    assert [delta.prompt_logprobs for delta in deltas] == [LogprobTable.of(scored)], "they go out with the first token"


def test_scores_of_named_prompt_tokens_that_come_again_are_not_taken_twice() -> None:
    harness = Harness(num_blocks=15, block_size=4, budget=4)
    rows = [[row, row] for row in range(5)]  # blocks of positions 3 to 7
    request = harness.add(8, max_tokens=2, prompt_logprob_token_ids=rows, prompt_logprob_start=2)
    scores = np.arange(10, dtype=np.float32).reshape(5, 2)
    for start, some in ((1, scores[:2]), (1, scores)):
        plan = harness.scheduler.schedule()
        chunk = PromptLogprobsChunk(plan.rows[0], start, [], some.tobytes())
        deltas = harness.scheduler.update(plan, StepResult([9] * len(plan.sample_rows), prompt_logprobs=[chunk]))
    assert request.prompt_scores == scores.tobytes()
    assert [delta.prompt_scores for delta in deltas] == [scores.tobytes()], "they go out with the first token"


def test_abort_frees_everything_at_once() -> None:
    harness = Harness(num_blocks=50, block_size=4)
    harness.add(9, max_tokens=20)
    group = harness.add(9, n=3, max_tokens=20)
    waiting = harness.add(9, n=8, max_tokens=20)
    harness.step()
    assert harness.scheduler.queues.running == [harness.requests[0], group]
    assert harness.scheduler.abort(group.request_id)
    assert harness.num_blocks - harness.cache.num_free_blocks == 3, "the blocks of the first request"
    assert harness.scheduler.abort(waiting.request_id)
    assert not harness.scheduler.abort(waiting.request_id)
    harness.scheduler.check()
    harness.run()
    assert {request_id for request_id, _ in harness.reasons} == {0}


def test_finishing_one_branch_leaves_the_others_alone() -> None:
    harness = Harness(num_blocks=30, block_size=4)
    request = harness.add(9, n=3, max_tokens=10, ignore_eos=True)
    harness.step()
    assert harness.scheduler.finish(request.request_id, 0)
    assert not harness.scheduler.finish(request.request_id, 0)
    harness.run()
    expected = harness.expected(request)
    assert harness.outputs[0, 0] == expected[0][:1]
    assert [harness.outputs[0, 1], harness.outputs[0, 2]] == expected[1:]


def test_first_branch_may_end_while_its_group_waits_to_return() -> None:
    harness = Harness(num_blocks=11, block_size=4, budget=4)
    harness.add(7, max_tokens=33, ignore_eos=True)
    group = harness.add(10, n=2, max_tokens=10, ignore_eos=True)
    while not group.num_preemptions:
        harness.step()
    while group not in harness.scheduler.queues.running:
        harness.step()
    assert harness.scheduler.finish(group.request_id, 0)
    harness.run()
    assert harness.outputs[group.request_id, 1] == harness.expected(group)[1]


def test_sliding_window_gives_back_blocks_that_no_layer_sees() -> None:
    harness = Harness(num_blocks=40, block_size=4, window=8)
    request = harness.add(6, max_tokens=60, ignore_eos=True)
    most = 0
    while harness.scheduler.has_requests:
        harness.step()
        most = max(most, harness.num_blocks - harness.cache.num_free_blocks)
    assert most <= 4
    harness.assert_right(request)


@pytest.mark.parametrize("is_run", [False, True])
def test_whom_a_failed_step_did_not_reach_runs_on(is_run: bool) -> None:
    harness = Harness(num_blocks=40, block_size=4, budget=3)
    group = harness.add(2, n=3, max_tokens=8, ignore_eos=True)
    other = harness.add(3, max_tokens=8, ignore_eos=True)
    harness.step()
    assert harness.scheduler.queues.running == [group, other]
    blocks, num_computed = harness.cache.block_ids(other.live[0].seq_id), other.live[0].num_computed_tokens
    assert harness.fail_step(is_run=is_run) == [group.request_id], "whose branches use up the budget"
    assert (harness.scheduler.queues.waiting, harness.scheduler.queues.running) == ([group], [other])
    assert harness.cache.block_ids(other.live[0].seq_id) == blocks
    assert other.live[0].num_computed_tokens == num_computed > 0
    harness.run()
    assert (group.num_preemptions, other.num_preemptions) == (1, 0)
    for request in (group, other):
        harness.assert_right(request)


def test_who_was_being_planned_answers_for_a_plan_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(num_blocks=40, block_size=3)
    requests = [harness.add(num_tokens, max_tokens=12, ignore_eos=True) for num_tokens in (3, 40, 3)]
    harness.step()
    append, victim = harness.cache.append, requests[1].live[0].seq_id

    def fail_for_victim(seq_id: int, count: int) -> TableUpdate | None:
        if seq_id == victim:
            raise MemoryError
        return append(seq_id, count)

    with monkeypatch.context() as patched:
        patched.setattr(type(harness.cache), "append", lambda _, *arguments: fail_for_victim(*arguments))
        with pytest.raises(MemoryError):
            harness.schedule()
    assert harness.scheduler.roll_back() == [1]
    harness.check()
    queues = harness.scheduler.queues
    assert (queues.running, queues.waiting) == (requests[2:], requests[:2]), "the last was not planned yet"
    assert harness.scheduler.abort(1)
    harness.run()
    for request in requests:
        harness.assert_right(request, whole=request is not requests[1])


def test_request_longer_than_the_model_is_refused_with_the_numbers() -> None:
    harness = Harness(num_blocks=100, max_model_len=20)
    with pytest.raises(ContextLengthError, match=r"15 tokens and max_tokens is 6: together 21.*20"):
        harness.add(15, max_tokens=6)
    with pytest.raises(ContextLengthError, match=r"prompt is too long: it has 20 .* maximum context length is 20"):
        harness.add(20, max_tokens=1)
    harness.add(15, max_tokens=5)
    harness.run()


@pytest.mark.parametrize("max_model_len", [1, 2])
def test_context_of_one_or_two_tokens_has_the_answer_in_it(max_model_len: int) -> None:
    harness = Harness(num_blocks=100, max_model_len=max_model_len)
    with pytest.raises(ContextLengthError, match=r"too long: it has .* the first token of the answer among them"):
        harness.add(max_model_len, max_tokens=1)
    if max_model_len > 1:
        harness.add(1, max_tokens=1)
        harness.run()


def test_request_that_could_never_fit_the_pool_is_refused_with_the_numbers() -> None:
    harness = Harness(num_blocks=8, block_size=4)
    with pytest.raises(ContextLengthError, match=r"may need 10 KV blocks of 4 tokens, but there are 8"):
        harness.add(10, n=4, max_tokens=6)
    request = harness.add(10, n=3, max_tokens=6, ignore_eos=True)
    harness.run()
    harness.assert_right(request)


def test_more_branches_than_seats_are_refused() -> None:
    harness = Harness(num_blocks=100, max_num_seqs=3)
    with pytest.raises(InvalidRequestError, match=r"n is 4, but at most 3") as refused:
        harness.add(2, n=4, max_tokens=1)
    assert refused.value.param == "n"
    assert not harness.scheduler.has_requests


@pytest.mark.parametrize(("prompt_len", "n"), [(1, 1), (7, 1), (8, 3), (13, 4)])
def test_most_tokens_is_just_what_is_admissible(prompt_len: int, n: int) -> None:
    scheduler = Harness(num_blocks=20, block_size=4, max_model_len=60).scheduler
    most = scheduler.limits.most_tokens(prompt_len, n)
    scheduler.limits.check_admissible(prompt_len, most, n)
    with pytest.raises(ContextLengthError):
        scheduler.limits.check_admissible(prompt_len, most + 1, n)


def test_stop_tokens_and_lengths_end_a_sequence() -> None:
    harness = Harness(num_blocks=40, block_size=4, max_num_seqs=4)
    free = harness.add(5, max_tokens=20, ignore_eos=True, seed=1)
    prompt, tokens = free.prompt_token_ids, harness.expected(free)[0]
    eos, stop = tokens[4], tokens[6]
    by_eos = harness.add(prompt, {eos}, max_tokens=20, seed=1)
    by_id = harness.add(prompt, max_tokens=20, seed=1, stop_token_ids=[stop])
    not_before = harness.add(prompt, {eos}, max_tokens=20, seed=1, min_tokens=6)
    ignoring = harness.add(prompt, {eos}, max_tokens=20, seed=1, ignore_eos=True)
    deltas = []
    while harness.scheduler.has_requests:
        deltas += harness.step()
    last = {d.request_id: (d.finish_reason, d.stop_reason) for d in deltas if d.finish_reason}
    assert last[free.request_id] == last[ignoring.request_id] == ("length", None)
    assert last[by_eos.request_id] == ("stop", None)
    assert last[by_id.request_id] == ("stop", stop)
    assert harness.outputs[by_eos.request_id, 0] == tokens[: tokens.index(eos) + 1]
    assert harness.outputs[by_id.request_id, 0] == tokens[: tokens.index(stop) + 1]
    assert len(harness.outputs[not_before.request_id, 0]) >= 6


def test_random_runs_with_a_window_are_safe_live_and_right() -> None:
    runs = [random_run(seed, crowded=seed % 2 == 0, windowed=True) for seed in range(30)]
    assert sum(harness.num_pinned for harness in runs) > 0
    assert sum(sum(harness.scheduler.preemption.stats.num_preemptions.values()) for harness in runs) > 0


@pytest.mark.parametrize(
    ("first_seed", "crowded"),
    [
        (0, False), (50, True),
        *(pytest.param(first, crowded, marks=pytest.mark.matrix) for first, crowded in ((0, True), (50, False))),
    ],
)  # fmt: skip
def test_random_runs_are_safe_live_and_right(first_seed: int, crowded: bool) -> None:
    runs = [random_run(seed, crowded=crowded) for seed in range(first_seed, first_seed + 50)]
    assert crowded or sum(harness.num_pinned for harness in runs) > 0
    assert sum(sum(harness.scheduler.preemption.stats.num_preemptions.values()) for harness in runs) > 0


@pytest.mark.parametrize("crowded", [False, True])
def test_random_runs_are_right_with_hardly_any_head_room(crowded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "HEAD_ROOM", 1)
    runs = [random_run(seed, crowded=crowded) for seed in range(300, 325)]
    assert sum(sum(harness.scheduler.preemption.stats.num_preemptions.values()) for harness in runs) > 0


def test_same_seed_gives_the_same_trace() -> None:
    for seed in (3, 77, 401):
        assert random_run(seed).executor.trace == random_run(seed).executor.trace


@pytest.mark.parametrize("seed", range(20))
def test_random_run_whose_plans_and_results_are_sent_as_bytes_is_the_same(seed: int) -> None:
    crowded = seed % 2 == 0
    sent, kept = (random_run(seed, crowded=crowded, sends=sends) for sends in (True, False))
    assert sent.executor.trace == kept.executor.trace
    assert sent.outputs == kept.outputs


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
def test_many_random_runs_are_safe_live_and_right() -> None:
    """`random_run` asserts safety after each step, and at its end an empty cache and the tokens of each request."""
    fuzz(lambda seed: random_run(seed, crowded=seed % 2 == 0, windowed=seed % 4 < 2), 10_000 * STEPS_PER_RUN)


@pytest.mark.parametrize("seed", range(12))
def test_repeated_steps_are_planned_as_if_each_sequence_was_looked_at(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    plans = random_run(seed, crowded=seed % 2 == 1).executor.trace
    with monkeypatch.context() as patched:
        patched.setattr(PlanBuilder, "repeated_by", lambda step, requests: False)
        patched.setattr(BlockTable, "append_blocks", lambda tables: None)
        assert random_run(seed, crowded=seed % 2 == 1).executor.trace == plans
