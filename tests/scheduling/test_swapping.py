"""Victims that are swapped out: the order of their return, with which blocks, and what becomes of them meanwhile."""

import pytest
from msgspec import structs

from quire.core.config import PreemptionMode
from quire.core.plan import MeasuredRates, StepPlan
from quire.core.sequence import Request, SequenceStatus
from quire.scheduling.waiting_lines import LineReader, WaitingLines
from support.scheduling import Harness

MODES: tuple[PreemptionMode, ...] = ("recompute", "swap", "auto")


def swapping(num_blocks: int, num_swap_blocks: int = 100, **settings: object) -> Harness:
    """A harness in which victims are swapped."""
    return Harness(num_blocks, num_swap_blocks=num_swap_blocks, mode="swap", **settings)  # type: ignore[arg-type]


def until_swapped(harness: Harness, victim: Request) -> None:
    """Step until a request has been swapped out."""
    while victim not in harness.scheduler.queues.swapped:
        assert harness.scheduler.has_requests, "never swapped out"
        harness.step()


def plan_that_swaps(harness: Harness, direction: str) -> StepPlan:
    """Step until a plan swaps something out, or in; that one has not run."""
    plan = harness.schedule()
    while not (plan.swap_outs if direction == "out" else plan.swap_ins):
        assert not plan.is_empty, f"never swapped {direction}"
        harness.execute(plan)
        plan = harness.schedule()
    return plan


def finish(harness: Harness) -> None:
    """Run to the end; everything must be right."""
    harness.run()
    for request in harness.requests.values():
        harness.assert_right(request)


def test_victim_comes_back_with_all_that_it_had_computed() -> None:
    harness = swapping(12)
    first = harness.add(8, max_tokens=30, ignore_eos=True)
    victim = harness.add(8, max_tokens=30, ignore_eos=True)
    until_swapped(harness, victim)
    num_computed = victim.live[0].num_computed_tokens
    assert num_computed == victim.live[0].num_tokens - 1
    assert victim.live[0].status is SequenceStatus.SWAPPED
    assert harness.cache.swap_space.num_free_blocks == 100 - harness.cache.blocks_for(num_computed)
    while victim not in harness.scheduler.queues.running:
        harness.step()
    counts = harness.executor.trace[-1][2]
    assert set(counts) == {1}, "nothing is computed twice"  # type: ignore[call-overload]
    finish(harness)
    assert first.num_preemptions == 0
    assert harness.scheduler.preemption.stats.num_recomputed_tokens == 0
    assert harness.executor.num_computed == 2 * (8 + 30 - 1)


def test_nothing_new_is_let_in_while_anything_is_swapped_out() -> None:
    harness = swapping(12)
    harness.add(8, max_tokens=30, ignore_eos=True)
    victim = harness.add(8, max_tokens=30, ignore_eos=True)
    until_swapped(harness, victim)
    late = harness.add(1, max_tokens=1)
    while victim in harness.scheduler.queues.swapped:
        assert late in harness.scheduler.queues.waiting
        harness.step()
    finish(harness)


def test_swapped_requests_return_in_their_order() -> None:
    harness = swapping(20, max_num_seqs=16)
    for _ in range(8):
        harness.add(3, max_tokens=40, ignore_eos=True)
    returned: list[int] = []
    while harness.scheduler.has_requests:
        before = [r for r in harness.requests.values() if r in harness.scheduler.queues.swapped]
        harness.step()
        now = [r.queue_key for r in before if r in harness.scheduler.queues.running]
        assert all(r.queue_key > max(now) for r in before if now and r in harness.scheduler.queues.swapped)
        returned += now
    assert len(returned) > 4
    finish(harness)


def test_group_comes_back_sharing_its_prompt() -> None:
    harness = swapping(14, max_num_seqs=4)
    harness.add(8, max_tokens=44, ignore_eos=True)
    group = harness.add(9, n=3, max_tokens=12, ignore_eos=True)
    until_swapped(harness, group)
    held = harness.num_swap_blocks - harness.cache.swap_space.num_free_blocks
    assert held < sum(harness.cache.blocks_for(s.num_computed_tokens) for s in group.live)
    while group not in harness.scheduler.queues.running:
        harness.step()
    tables = [harness.cache.block_ids(sequence.seq_id) for sequence in group.live]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    finish(harness)


def test_group_that_was_planned_in_part_loses_nothing() -> None:
    """Its last branch finds no block, so that what its first was given in this step is taken back."""
    retracted = 0
    for prompt_len in range(4, 12):
        harness = swapping(11, max_num_seqs=4)
        harness.add(prompt_len, max_tokens=30, ignore_eos=True)
        group = harness.add(prompt_len, n=2, max_tokens=10, ignore_eos=True)
        while harness.scheduler.has_requests and group not in harness.scheduler.queues.swapped:
            harness.step()
        if group in harness.scheduler.queues.swapped:
            retracted += 1
            assert all(s.num_computed_tokens == s.num_tokens - 1 for s in group.live)
        finish(harness)
        assert harness.scheduler.preemption.stats.num_recomputed_tokens == 0
    assert retracted > 0


def test_prompt_that_was_computed_in_part_goes_on_where_it_was() -> None:
    harness = swapping(11, budget=2)
    harness.add(3, max_tokens=36, ignore_eos=True)
    for _ in range(3):
        harness.step()
    victim = harness.add(24, n=2, max_tokens=4, ignore_eos=True)
    until_swapped(harness, victim)
    assert [sequence.status.value for sequence in victim.live] == ["swapped", "waiting"]
    assert 0 < victim.live[0].num_computed_tokens < 24
    finish(harness)
    assert harness.scheduler.preemption.stats.num_recomputed_tokens == 0


def test_first_branch_may_end_while_its_prompt_is_swapped_out() -> None:
    harness = swapping(11, budget=2)
    harness.add(3, max_tokens=36, ignore_eos=True)
    for _ in range(3):
        harness.step()
    victim = harness.add(24, n=2, max_tokens=4, ignore_eos=True)
    until_swapped(harness, victim)
    assert harness.scheduler.finish(victim.request_id, 0)
    assert harness.cache.swap_space.num_free_blocks == 100
    harness.check()
    harness.run()
    assert harness.outputs[victim.request_id, 1] == harness.expected(victim)[1]


@pytest.mark.parametrize("whole", [True, False])
def test_swapped_request_can_be_ended(whole: bool) -> None:
    harness = swapping(12)
    harness.add(8, max_tokens=30, ignore_eos=True)
    group = harness.add(8, n=2, max_tokens=12, ignore_eos=True)
    until_swapped(harness, group)
    if whole:
        assert harness.scheduler.abort(group.request_id)
        assert harness.cache.swap_space.num_free_blocks == 100
        assert group not in harness.scheduler.queues.swapped
    else:
        assert harness.scheduler.finish(group.request_id, 0)
        assert harness.cache.swap_space.num_free_blocks < 100
    harness.check()
    harness.run()
    harness.assert_right(group, whole=False)
    if not whole:
        assert harness.outputs[group.request_id, 1] == harness.expected(group)[1]


@pytest.mark.parametrize("direction", ["out", "in"])
def test_request_can_be_aborted_while_its_step_swaps_it(direction: str) -> None:
    harness = swapping(12, caching=True)
    first = harness.add(8, max_tokens=30, ignore_eos=True)
    victim = harness.add(8, max_tokens=30, ignore_eos=True)
    plan = plan_that_swaps(harness, direction)
    assert harness.scheduler.abort(victim.request_id)
    harness.cache.check()
    harness.execute(plan)
    harness.run()
    harness.assert_right(first)
    harness.assert_right(victim, whole=False)


def test_full_swap_space_leaves_recomputation() -> None:
    harness = swapping(12, num_swap_blocks=1)
    harness.add(8, max_tokens=30, ignore_eos=True)
    victim = harness.add(8, max_tokens=30, ignore_eos=True)
    finish(harness)
    assert victim.num_preemptions > 0
    assert harness.scheduler.preemption.stats.num_preemptions["swap"] == 0
    assert harness.executor.num_swapped == 0


def test_what_was_swapped_out_before_a_failed_step_is_as_it_was() -> None:
    harness = swapping(12)
    harness.add(8, max_tokens=30, ignore_eos=True)
    victim = harness.add(8, max_tokens=30, ignore_eos=True)
    until_swapped(harness, victim)
    harness.step(fails=True)
    assert victim in harness.scheduler.queues.swapped
    finish(harness)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("direction", ["out", "in"])
def test_what_a_failed_step_was_to_swap_is_computed_again(direction: str, caching: bool) -> None:
    harness = swapping(12, caching=caching)
    harness.add(8, max_tokens=30, ignore_eos=True)
    victim = harness.add(8, max_tokens=30, ignore_eos=True)
    harness.fail(plan_that_swaps(harness, direction))
    assert victim in harness.scheduler.queues.waiting
    assert harness.cache.swap_space.num_free_blocks == 100
    finish(harness)


def test_prefix_that_is_still_there_does_not_come_in() -> None:
    harness = swapping(12, caching=True)
    harness.add(list(range(8)), max_tokens=30, ignore_eos=True)
    harness.add([*range(8), 49], max_tokens=30, ignore_eos=True)
    out = plan_that_swaps(harness, "out")
    harness.execute(out)
    back = plan_that_swaps(harness, "in")
    assert len(back.swap_ins) < len(out.swap_outs) - 1
    harness.execute(back)
    finish(harness)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_swap_blocks", [1, 8, 1000])
@pytest.mark.parametrize("caching", [False, True])
def test_many_long_generations_in_a_pool_for_one_and_a_half(
    mode: PreemptionMode, num_swap_blocks: int, caching: bool
) -> None:
    harness = Harness(
        24, max_num_seqs=32, caching=caching, num_swap_blocks=num_swap_blocks, mode=mode,
        rates=MeasuredRates(100, 20, 20),
    )  # fmt: skip
    requests = [harness.add(8, max_tokens=56, ignore_eos=True) for _ in range(32)]
    finish(harness)
    assert max(request.num_preemptions for request in requests) <= 4
    assert sum(harness.scheduler.preemption.stats.num_preemptions.values()) > 32


def test_only_an_earlier_victim_comes_before_what_is_swapped_out() -> None:
    harness = Harness(100)
    new, lost, swapped, lost_later = [harness.add(4, max_tokens=4) for _ in range(4)]
    queues = harness.scheduler.queues
    for request in (new, lost, swapped, lost_later):
        queues._remove(request)
    lost.num_preemptions = lost_later.num_preemptions = 1

    def next_to_admit(waiting: list[Request], is_swapped: bool, passed: Request | None = None) -> Request | None:
        lines = queues.lines = WaitingLines(queues._policy.rank, queues._policy.make_line)
        queues.swapped = [swapped] if is_swapped else []
        for request in waiting:
            lines.add(request)
        reader = LineReader(lines)
        if passed is not None:
            reader.pass_over(passed)
        return queues.next_to_admit(reader)

    assert next_to_admit([], is_swapped=False) is None
    assert next_to_admit([], is_swapped=True) is swapped
    assert next_to_admit([lost_later], is_swapped=True) is swapped
    assert next_to_admit([lost, lost_later], is_swapped=True) is lost
    waiting = [new, lost, lost_later]
    assert next_to_admit(waiting, is_swapped=True) is lost, "nothing new, which may stand before it by priority"
    assert next_to_admit(waiting, is_swapped=True, passed=lost) is swapped
    assert next_to_admit(waiting, is_swapped=False) is new


def test_seconds_of_swaps_are_added_up() -> None:
    harness = Harness(num_blocks=8)
    harness.add(3, max_tokens=3, ignore_eos=True)
    for _ in range(2):
        plan = harness.schedule()
        harness.executor.submit(plan)
        harness.scheduler.update(plan, structs.replace(harness.executor.collect(), swap_s=0.5))
    assert harness.scheduler.preemption.stats.swap_s == 1.0
