"""States of sequences: each step finds the state that its rows need, whatever the scheduler does with slots.

The fake executor keeps, for each slot, a digest of the tokens that its state has seen, and the tokens of its ring.
"""

import os
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from msgspec import structs

from quire.cache.block_pool import OutOfBlocksError
from quire.cache.manager import KVCacheManager
from quire.cache.prefix_tree import NONE, PrefixMatch
from quire.cache.states import PlannedEntry, SequenceState, States, most_slots
from quire.core.config import PreemptionMode
from quire.core.deltas import WAIT_REASONS
from quire.core.errors import InvalidRequestError
from quire.core.plan import EntryState, RowResult, StepResult
from quire.core.pooling import NO_SCOPE
from quire.core.sampling_params import BeamSearchParams
from quire.scheduling import admission
from quire.scheduling.plan_builder import PlanBuilder
from support.fake_executor import VOCAB_SIZE, FakeExecutor, next_token
from support.fuzz_seeds import STEPS_PER_RUN, fuzz
from support.scheduling import Harness, random_run

PROMPT = list(range(30))


class DraftingExecutor(FakeExecutor):
    """Drafts some right and some wrong tokens, forces some, and is late with masks: all that takes back tokens."""

    def __init__(self, *sizes: Any) -> None:  # noqa: ANN401
        super().__init__(*sizes)
        self._rng = random.Random(7)
        self.num_rejected = self.num_late = 0

    def collect(self) -> StepResult:
        plan = self._plans[0]
        result = super().collect()
        rows = dict(result.rows)
        self.num_rejected += sum(
            1 + len(each.token_ids) - len(rows[each.row].token_ids) for each in plan.drafts
        )
        for row in dict.fromkeys(plan.sample_rows):
            if self._rows[row].beam is None and self._rng.random() < 0.7:
                known = rows.get(row) or RowResult([result.token_ids[plan.sample_rows.index(row)]])
                rows[row] = self._altered(row, known)
        return structs.replace(result, rows=rows)

    def _altered(self, row: int, known: RowResult) -> RowResult:
        num_known = len(known.token_ids)
        if self._rows[row].params.structured_outputs is not None and self._rng.random() < 0.4:
            self.num_late += 1
            del self._tokens[row][-num_known:]
            computed = None if known.num_computed is None else known.num_computed - num_known + 1
            return RowResult(num_computed=computed, is_late=True)
        forced = self._following(row, self._rng.choice([0, 0, 0, 2]))
        self._tokens[row] += forced
        drafts = self._following(row, self._rng.randint(0, 4))
        if drafts and self._rng.random() < 0.5:
            drafts[self._rng.randrange(len(drafts))] = self._rng.randrange(VOCAB_SIZE)
        return structs.replace(known, forced=forced, drafts=drafts)

    def _following(self, row: int, count: int) -> list[int]:
        """Return the next tokens that the draws would give."""
        tokens = self._tokens[row].copy()
        for _ in range(count):
            self._tokens[row].append(next_token(self._digest(row, len(self._tokens[row])), self._rows[row].seed))
        following, self._tokens[row] = self._tokens[row][len(tokens) :], tokens
        return following


def assert_tried(runs: list[Harness], *, swaps: bool) -> None:
    """Assert that runs took and lost snapshots, found prefixes, waited for slots, and preempted in both ways."""
    states = [run.cache.states.stats() for run in runs if run.cache.states is not None]
    found = {name: sum(each[name] for each in states) for name in ("snapshots", "evicted_snapshots")}
    found["hits"] = sum(run.cache.prefixes.num_found for run in runs)
    for kind in ("swap", "recompute") if swaps else ("recompute",):
        found[kind] = sum(run.scheduler.preemption.stats.num_preemptions[kind] for run in runs)
    found["state_slots"] = sum(
        any(request.waited[WAIT_REASONS.index("state_slots")] for request in run.requests.values()) for run in runs
    )
    assert min(found.values()) > 0, found


def drafting_runs(seeds: Iterable[int]) -> list[Harness]:
    return [
        random_run(seed, crowded=seed % 2 > 0, stateful=True, executor_class=DraftingExecutor) for seed in seeds
    ]


@pytest.mark.parametrize("crowded", [False, True])
def test_random_runs_are_safe_live_and_right(crowded: bool) -> None:
    assert_tried([random_run(seed, crowded=crowded, stateful=True) for seed in range(40)], swaps=crowded)


@pytest.mark.parametrize("crowded", [False, True])
def test_random_runs_with_drafts_and_late_rows_are_safe_live_and_right(crowded: bool) -> None:
    runs = drafting_runs(range(100 + crowded, 160, 2))
    executors = [run.executor for run in runs if isinstance(run.executor, DraftingExecutor)]
    assert min(sum(each.num_rejected for each in executors), sum(each.num_late for each in executors)) > 10
    assert_tried(runs, swaps=crowded)


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
def test_ten_thousand_random_requests_find_the_states_that_they_need() -> None:
    """Slots in use are those of holders after each step, and none at the end of a run."""
    num_requests = 0

    def run(seed: int) -> None:
        nonlocal num_requests
        executor_class = DraftingExecutor if seed % 4 < 2 else FakeExecutor
        done = random_run(seed, crowded=seed % 2 > 0, stateful=True, executor_class=executor_class)
        num_requests += len(done.requests)

    fuzz(run, 2500 * STEPS_PER_RUN)
    assert num_requests > 10_000 or "QUIRE_FUZZ_STEPS" in os.environ


def test_branches_that_start_again_need_no_more_blocks_than_were_counted() -> None:
    """A branch without a snapshot had the prompt in blocks of its own: in a pool for one copy, the step failed."""
    random_run(731991255, crowded=True, stateful=True)


def harness(**settings: Any) -> Harness:  # noqa: ANN401
    return Harness(**{"num_blocks": 200, "caching": True, "num_state_slots": 40, "budget": 64} | settings)


def cached_tokens(machine: Harness, *prompts: list[int], **settings: Any) -> list[int]:  # noqa: ANN401
    """Run requests at once; return the tokens of each that it found."""
    requests = [machine.add(prompt, ignore_eos=True, **{"max_tokens": 10} | settings) for prompt in prompts]
    machine.run()
    for request in requests:
        machine.assert_right(request)
    return [request.num_cached_tokens for request in requests]


def test_prompt_is_found_to_its_last_full_block_and_an_answer_too() -> None:
    machine = harness()
    assert cached_tokens(machine, PROMPT) == [0]
    assert cached_tokens(machine, PROMPT) == [28]
    answered = PROMPT + machine.outputs[0, 0]                # the last token has not been computed
    assert cached_tokens(machine, [*answered, 1, 2, 3]) == [36]
    assert cached_tokens(machine, PROMPT[:28]) == [0], "a state that has seen all tokens gives no logits"
    assert cached_tokens(machine, PROMPT[:28]) == [24]


def test_second_request_that_parts_from_a_prompt_pays_and_the_third_does_not() -> None:
    machine = harness()
    prompts = [[*PROMPT[:18], own, own, own, own] for own in (41, 42, 43)]
    assert [cached_tokens(machine, each)[0] for each in (PROMPT, *prompts)] == [0, 0, 16, 16]
    assert [request.num_stateless_tokens for request in machine.requests.values()] == [0, 16, 0, 0]


def test_requests_that_wait_for_a_prompt_begin_where_they_part_from_it() -> None:
    machine = harness()
    prompts = [[7] * 41 + [own] * 5 for own in range(4)]
    assert cached_tokens(machine, *prompts) == [0, 40, 40, 40]


def test_requests_wait_for_the_one_that_computes_their_common_state_again() -> None:
    """The first takes several steps, in which no other is looked at, and leaves no state where they part."""
    machine = harness()
    prompts = [[9] * 100 + [own] * 50 for own in range(4)]
    assert cached_tokens(machine, *prompts) == [0, 0, 100, 100]
    assert [request.num_stateless_tokens for request in machine.requests.values()] == [0, 100, 0, 0]


def test_lookups_of_blocks_without_a_state_count_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk of the first leaves budget, with which the others are looked at, and wait for its state."""
    machine, prompt = harness(num_blocks=3000, num_state_slots=100, budget=3000, max_num_seqs=40), [9] * 4000
    cached_tokens(machine, prompt, max_tokens=1)
    tree = machine.cache.prefixes.snapshots
    assert tree is not None
    while tree.evict():
        pass
    monkeypatch.setattr(admission, "MAX_WORK", 1000)  # three lookups: 750 blocks are in a table, 250 are not
    match, lookups = KVCacheManager.match, list[int]()

    def counted(*args: Any) -> PrefixMatch:  # noqa: ANN401
        lookups[-1] += 1
        return match(*args)

    monkeypatch.setattr(KVCacheManager, "match", counted)
    requests = [machine.add([*prompt, own], max_tokens=1, ignore_eos=True) for own in range(30)]
    while machine.scheduler.queues.requests:
        lookups.append(0)
        machine.step()
    assert 1 < max(lookups) < 8, lookups
    assert [request.num_cached_tokens for request in requests] == [0, *[4000] * 29]


def test_without_room_for_snapshots_all_run_and_nothing_is_found() -> None:
    machine = harness(num_state_slots=1, max_num_seqs=1)
    assert cached_tokens(machine, PROMPT, PROMPT, [*PROMPT, 3, 4]) == [0, 0, 0]


def test_snapshots_that_were_used_the_longest_ago_make_room() -> None:
    machine = harness(num_state_slots=4, max_num_seqs=1)
    first, second, third, *others = ([own] * 18 for own in (1, 2, 3, 4, 5))
    for each in (first, second, first, third):
        cached_tokens(machine, each, max_tokens=1)
    assert cached_tokens(machine, first, max_tokens=1) == [16]
    assert cached_tokens(machine, second, max_tokens=1) == [16]
    cached_tokens(machine, *others, max_tokens=1)
    assert cached_tokens(machine, third, max_tokens=1) == [0]


def test_snapshot_of_an_output_makes_room_for_the_next_one() -> None:
    machine = harness(num_state_slots=4, max_num_seqs=1)
    for own, max_tokens in ((1, 1), (2, 20)):
        cached_tokens(machine, [own] * 18, max_tokens=max_tokens)
    assert cached_tokens(machine, [1] * 18) == [16]


def test_requests_wait_for_slots_with_a_reason_of_their_own() -> None:
    machine = harness(num_state_slots=3, max_num_seqs=8)
    for own in range(4):
        machine.add([own] * 9, max_tokens=5, ignore_eos=True)
    machine.step()
    assert machine.scheduler.queues.num_running_seqs == 2
    assert machine.scheduler.queues.wait_reasons.current == "state_slots"
    machine.run()
    for request in machine.requests.values():
        machine.assert_right(request)


def test_request_with_more_branches_than_there_are_slots_for_is_refused() -> None:
    machine = harness(num_state_slots=5)
    with pytest.raises(InvalidRequestError, match=r"n is 4: as many sequences may need 6 slots .* are 5 \(num_state"):
        machine.add(9, n=4, max_tokens=5)
    assert machine.add(9, n=3, max_tokens=5)
    machine.run()


def test_beams_that_come_in_pairs_take_the_most_slots() -> None:
    machine = harness(num_state_slots=most_slots(4), max_num_seqs=4, caching=False)
    request = machine.add_beams(PROMPT, BeamSearchParams(4, 16, ignore_eos=True))
    machine.run()
    machine.assert_right(request)


def test_failed_step_leaves_no_snapshot() -> None:
    machine = harness()
    request = machine.add(PROMPT, max_tokens=10, ignore_eos=True)
    machine.step(fails=True)
    assert machine.cache.states is not None
    assert machine.cache.states.stats()["snapshot_slots"] == 0
    machine.run()
    machine.assert_right(request)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", ["swap", "recompute"])
def test_preempted_branches_return_with_their_states(
    kind: PreemptionMode, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = harness(mode=kind, num_swap_blocks=50, num_swap_slots=4)
    requests = [machine.add([own] * 20, n=n, max_tokens=40, ignore_eos=True) for own in (1, 2)]
    for _ in range(14):
        machine.step()
    planner = machine.scheduler.planner
    start_step = planner.start_step

    def preempt(step: PlanBuilder) -> None:
        start_step(step)
        planner.preempt(step, requests[1])

    monkeypatch.setattr(planner, "start_step", preempt)
    machine.step()
    monkeypatch.undo()
    machine.run()
    assert requests[1].num_preemptions == 1
    assert requests[1].num_recomputed_tokens == (n if kind == "recompute" else 0), "from their last full blocks on"
    for request in requests:
        machine.assert_right(request)


def never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = States.plan

    def hasty(self: States, entries: Iterable[PlannedEntry]) -> list[EntryState]:
        return plan(self, [entry._replace(may_be_late=False) for entry in entries])

    monkeypatch.setattr(States, "plan", hasty)


def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    other = States._slot_to_write

    def own(self: States, state: SequenceState) -> int:
        return other(self, state) if state.slot == NONE else state.slot

    monkeypatch.setattr(States, "_slot_to_write", own)


def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(States, "_written", lambda self, state: list(state.snapshots))


@pytest.mark.parametrize("fault", [never_late, in_place, trusted])
def test_faults_would_show(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        drafting_runs(range(100, 160))


def test_slot_that_is_loaded_into_is_taken_before_a_snapshot_of_a_running_sequence() -> None:
    """The tree has none to evict: the load ends without its state, and may not publish it."""
    machine = harness(num_state_slots=2)
    states = machine.cache.states
    assert states is not None
    assert states.lease(90)
    assert states.lease(91)
    assert not states.lease(92)
    machine.add(PROMPT, max_tokens=2)
    machine.run()
    assert states.leased(90) is None
    states.publish_lease(90, 0)
    states.end_lease(91)
    machine.check()
    machine.assert_empty()


def test_lease_without_a_slot_for_its_state_changes_nothing() -> None:
    """A sequence that begins with the only snapshot holds its slot, too: to evict it would end the match alone."""
    machine = harness(num_state_slots=2)
    cached_tokens(machine, PROMPT, max_tokens=1)
    cache, states = machine.cache, machine.cache.states
    assert states is not None
    assert states.lease(90)
    match = cache.match(PROMPT, 30, NO_SCOPE)
    assert match.num_tokens == 28
    cache.create(91, PROMPT, NO_SCOPE, match)
    for num_blocks, with_state in ((9, True), (999, False)):
        with pytest.raises(OutOfBlocksError):
            cache.lease(92, PROMPT, NO_SCOPE, match, num_blocks, with_state=with_state)
        assert cache.match(PROMPT, 30, NO_SCOPE).num_tokens == 28
    cache.create(93, PROMPT, NO_SCOPE, match)
    for seq_id in (91, 93):
        cache.free(seq_id)
    states.end_lease(90)
    machine.check()


def test_pins_keep_their_snapshots_in_half_of_the_slots() -> None:
    machine = harness(num_state_slots=6, max_num_seqs=2, max_model_len=100)
    pins = [machine.pin([own] * 22) for own in (1, 2, 3)]
    machine.run()
    others = [[own] * 18 for own in range(10, 30)]
    cached_tokens(machine, *others)
    states = machine.cache.states
    assert states is not None
    assert states.stats()["kept_slots"] == 3
    assert [cached_tokens(machine, [own] * 30)[0] for own in (1, 2, 3)] == [20, 20, 20]
    machine.pin([4] * 22)
    machine.run()
    cached_tokens(machine, *others)
    assert states.stats()["kept_slots"] == 3, "that of the first pin is not kept any more"
    assert [cached_tokens(machine, [own] * 30)[0] for own in (1, 2, 3, 4)] == [0, 20, 20, 20]
    for pin in pins[1:]:
        assert machine.scheduler.abort(pin.request_id)
    assert states.stats()["kept_slots"] == 1
    cached_tokens(machine, *others)
    assert cached_tokens(machine, [2] * 30) == [0]


def test_kept_snapshots_give_way_to_running_sequences() -> None:
    """Two beams that part take three slots; the pin has blocks alone from then on, and its prompt is computed again."""
    machine = harness(num_state_slots=3, max_num_seqs=2, max_model_len=100)
    machine.pin([1] * 22)
    machine.run()
    states = machine.cache.states
    assert states is not None
    assert states.stats()["kept_slots"] == 1
    request = machine.add_beams(PROMPT, BeamSearchParams(2, 16, ignore_eos=True))
    machine.run()
    machine.assert_right(request)
    assert states.stats()["kept_slots"] == 0
    assert cached_tokens(machine, [1] * 30) == [0]
