"""The scheduler: waiting and running requests become a `StepPlan`; a `StepResult` becomes their new state.

One rule and no phases: a sequence has known tokens and computed tokens, and a step advances the second toward the
first by at most the token budget. Chunked prefill, decoding, recomputation after a preemption and what is found in the
prefix cache all follow from it.

Requests are served in the order of a policy: by priority with ageing, by arrival, or by shares of clients. While
anything is swapped out nothing new is admitted. The first in order is never preempted, and no request is accepted that
could not finish alone: every accepted request finishes. `RequestQueues` has the queues, `Planner` writes plans.
Pure Python: no torch, no clock, no I/O.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count

from quire.cache.block_pool import run_to_the_end
from quire.cache.loads import Loads
from quire.cache.manager import KVCacheManager, UncachedManager
from quire.cache.measured_pool import MeasuredPool
from quire.cache.prefix_cache import PrefixCache
from quire.cache.prefixes import Prefixes
from quire.cache.states import PlannedEntry, States
from quire.core.config import CacheConfig, SchedulerConfig, SchedulingPolicy
from quire.core.deltas import PREPARATION, SequenceDelta
from quire.core.images import cache_keys
from quire.core.optional_package import SCHEDULERS, load
from quire.core.plan import StepPlan, StepResult
from quire.core.pooling import BeamTask, PinTask
from quire.core.sampling_params import branch_seed
from quire.core.sequence import NO_ROW, Request, Sequence
from quire.core.token_ids import TokenIds, pack_tokens
from quire.scheduling.admission import AdmissionControl
from quire.scheduling.async_scheduling import must_see_tokens, schedule_next
from quire.scheduling.beam_search import BeamSearches
from quire.scheduling.fair_share import FairShare
from quire.scheduling.limits import (
    DEADLINE,
    AdmissionLimits,
    Deadlines,
    check_pinnable,
    check_pinned,
    late_ends,
    late_failure,
    num_pinned_blocks,
)
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.planner import Planner
from quire.scheduling.preemption import PreemptionPolicy
from quire.scheduling.queues import RequestQueues
from quire.scheduling.result_recorder import ResultRecorder
from quire.scheduling.waiting_lines import ByPriority, FirstComeFirstServed, Lack

ORDERS: Mapping[SchedulingPolicy, type[ByPriority]] = {
    "priority": ByPriority, "fcfs": FirstComeFirstServed, "fair": FairShare
}  # fmt: skip


class Scheduler:
    """Chooses the requests of each step, and records the results. The only writer of a sequence's tokens.

    `unprepared` returns what a waiting request lacks of what is prepared for it by another thread; None: nothing.
    `queues` has the requests; `step` is the step that is being planned, or is under way.
    """

    def __init__(
        self, config: SchedulerConfig, cache: KVCacheManager, admission: type[AdmissionControl] = AdmissionControl,
        unprepared: Callable[[Request], Lack | None] = lambda request: None,
    ) -> None:  # fmt: skip
        self.config = config
        self.cache = cache
        self.limits = AdmissionLimits(
            cache.num_blocks, cache.block_size, config.max_num_seqs, config.max_model_len,
            0 if cache.states is None else cache.states.num_slots,
        )
        self.order = ORDERS[config.scheduling_policy]()
        self.queues = RequestQueues(cache, config.max_num_seqs, self.order)
        self.admission = admission(self.queues, cache, config)
        self.preemption = PreemptionPolicy(config.preemption_mode, cache.block_size)
        self.planner = Planner(config, self.queues, self.admission, self.preemption, self.order, cache, unprepared)
        self.step = PlanBuilder()
        self._ahead: PlanBuilder | None = None      # the step after the one under way, if it has been planned already
        self._seq_ids = count()
        pool = cache.prefixes.pool
        self.measured = pool if isinstance(pool, MeasuredPool) else None    # a pool that measures its blocks
        self._deadlines = Deadlines(self.queues.requests)
        self._searches = BeamSearches(cache, self.queues)
        self._recorder = ResultRecorder(cache, self.queues, self.order, self._searches, self._finish, self._complete)

    # --- requests -----------------------------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """Return whether a request is unfinished, or a delta was not returned yet."""
        return bool(self.queues.requests or self._recorder.deltas)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError, and changes nothing, if it could never run."""
        assert request.request_id not in self.queues.requests, f"request {request.request_id} added twice"
        num_prompt_tokens = len(request.prompt_token_ids)
        self.limits.check_admissible(num_prompt_tokens, request.max_tokens, request.params.n)
        if isinstance(request.task, PinTask):
            check_pinnable(num_prompt_tokens, self.queues.requests.values(), self.cache, self.limits)
        prompt = pack_tokens(request.prompt_token_ids)
        if request.images:
            prompt = cache_keys(prompt, request.images)
        request.live = [
            Sequence(
                seq_id=next(self._seq_ids),
                index=index,
                seed=branch_seed(request.seed, index),
                token_ids=TokenIds(prompt),
                num_prompt_tokens=num_prompt_tokens,
            )
            for index in range(request.params.n)
        ]
        request.must_see_tokens = must_see_tokens(request)
        request.end_token_ids = request.eos_token_ids | request.stop_token_ids
        request.is_plain = not isinstance(request.task, BeamTask) and request.params.repetition_detection is None
        self.admission.check_admissible(request)
        self.queues.add(request)
        self._deadlines.add(request)
        if isinstance(request.task, BeamTask):
            self._searches.add(request)
        if isinstance(request.task, PinTask):
            self._update_pin_limits()

    def abort(self, request_id: int) -> bool:
        """End a request at once, wherever it is; its blocks are free on return. False if it is not here (any more).

        A prefix that it has pinned is unpinned.
        """
        request = self.queues.requests.get(request_id)
        if request is not None:
            self._finish_all(request)
            return True
        is_pin = self.cache.unpin(request_id)
        if is_pin:
            self._update_pin_limits()
        return is_pin

    def fail(self, request_id: int, error: str, param: str) -> None:
        """End a request with an error, for which a field of it is the reason."""
        if self.abort(request_id):
            self._recorder.deltas.append(SequenceDelta(request_id, 0, [], error=error, param=param))

    def _end_late(self, request: Request) -> None:
        """End a request past its deadline: with what it has, or with an error if that is nothing."""
        if not request.has_begun:
            ends = [late_failure(request)]
        elif isinstance(request.task, BeamTask):
            ends = self._searches.conclude(request)
            for delta in ends:
                if delta.finish_reason == "length":
                    delta.stop_reason, delta.is_late = DEADLINE, True
        else:
            ends = late_ends(request)
        self._finish_all(request)
        self._recorder.deltas += ends

    def finish(self, request_id: int, index: int) -> bool:
        """End one branch, because its text is complete. False if it is not here (any more), or is a beam."""
        request = self.queues.requests.get(request_id)
        sequence = next((s for s in request.live if s.index == index), None) if request else None
        if request is None or sequence is None or isinstance(request.task, BeamTask):
            return False
        self._finish(request, sequence)
        return True

    def _finish(self, request: Request, sequence: Sequence, *, is_whole: bool = True) -> None:
        """End a branch for good; with the last one the request ends. `is_whole`: it has its last token."""
        if self.cache.loads is not None:
            self._end_in_loads(self.cache.loads, request, sequence, is_whole=is_whole)
        self.queues.finish(request, sequence)
        if not request.live:
            self._searches.remove(request)
            if isinstance(request.task, PinTask):
                self._update_pin_limits()

    def _end_in_loads(self, loads: Loads, request: Request, sequence: Sequence, *, is_whole: bool) -> None:
        """End the load of a request with its last branch; keep what a branch leaves, for the disk or another engine."""
        if loads.tickets is not None and request.is_kept and is_whole:
            loads.tickets.keep(request, sequence)
        if loads.disk is not None:
            writes, num_computed = loads.disk.writes, sequence.num_computed_tokens
            writes.finish(request.scope, sequence.token_ids, num_computed, is_whole=is_whole)
        if len(request.live) == 1:
            loads.end(request.request_id)

    def _finish_all(self, request: Request) -> None:
        for sequence in list(request.live):
            self._finish(request, sequence, is_whole=False)

    def _update_pin_limits(self) -> None:
        num_pinned = num_pinned_blocks(self.queues.requests.values(), self.cache)
        self.limits = replace(self.limits, num_pinned_blocks=num_pinned)

    # --- the plan -------------------------------------------------------------------------------------------------

    def schedule(self, now_s: float = 0.0) -> StepPlan:
        """Plan the next step. The plan is empty only if no request runs, and those that wait are being prepared.

        `now_s`: the time by the clock of `Request.arrived_s`. First, requests past their deadlines end.
        Returns the plan of `schedule_next`, which admits no request, if there is one.
        """
        if self.measured is not None:
            self.measured.now_s = now_s
        if now_s >= self._deadlines.next_s:
            for request in self._deadlines.take_passed(now_s):
                self._end_late(request)
        if self._ahead is not None:
            self.step, self._ahead = self._ahead, None
            self.step.now_s, self.step.is_planned = now_s, True
            return self.step.plan
        last, step = self.step, PlanBuilder(now_s)
        self.step = step
        plan = self._start_step(step)
        self.planner.start_step(step)
        budget = self.planner.plan_running(step, last, self.config.max_num_batched_tokens)
        if self.queues.waiting or self.queues.swapped:
            self._admit(step, budget)
        step.at = None
        if self.queues.num_drafted:
            self._plan_drafts(step)
        if self.cache.states is not None and plan.rows:
            _plan_states(step, self.cache.states)
        if not plan.rows:
            self._check_idle()
        step.is_planned = True
        return plan

    def _check_idle(self) -> None:
        """Assert that a plan may be empty."""
        is_idle = not self.queues.requests or self.queues.wait_reasons.current in PREPARATION
        assert is_idle, "requests are here, but none of them can run"

    def schedule_next(self) -> StepPlan | None:
        """Return the step after the one under way, to be recorded after it; None where it cannot be planned yet."""
        has_drafts = self.queues.num_drafted > 0 or self.step.plan.drafts
        if self.cache.loads is not None and self.cache.loads.num_loads:
            return None     # blocks are moved between steps, when none is in flight
        if has_drafts or self.cache.has_window or self.admission.has_room_for_next() or self.planner.has_excess():
            return None
        self._ahead = schedule_next(
            self.step, self.queues.running, self.queues.num_running_seqs, self.config.max_num_batched_tokens,
            self.cache, self.planner.time,
        )
        if self._ahead is not None and self.cache.states is not None:
            _plan_states(self._ahead, self.cache.states)
        return None if self._ahead is None else self._start_step(self._ahead)

    def _start_step(self, step: PlanBuilder) -> StepPlan:
        """Count a step, and put into its plan what the last one has left to do."""
        self.order.num_steps += 1
        if self._searches.row_forks:
            step.plan.row_forks.extend(self._searches.take_row_forks())
        if self.cache.copies_forks:
            step.plan.copies.extend(self.cache.take_copies())
        return step.plan

    def _admit(self, step: PlanBuilder, budget: int) -> None:
        """Admit waiting requests that fit; count why the rest wait."""
        self.queues.wait_reasons.count(self.planner.admit(step, budget))

    def _plan_drafts(self, step: PlanBuilder) -> None:
        """Plan drafts from the remaining budget, unless a request waits for budget."""
        left = self.config.max_num_batched_tokens - step.num_tokens
        self.planner.plan_drafts(step, 0 if self.queues.wait_reasons.current == "token_budget" else left)

    # --- the result -----------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceDelta]:
        """Record a step: append its tokens, end what has reached its end, free what that held.

        If that fails, `take_deltas` has what had been recorded before, and so has the next update.
        """
        step = self.step
        assert plan is step.plan, "a result for another plan"
        if result.failures:
            self._recorder.fail(result.failures, result.at_fault)
        self._recorder.advance(step, result, self._ahead)
        self.cache.end_step()
        self.preemption.rates = result.rates
        self.preemption.stats.swap_s += result.swap_s
        self.planner.time.record(result.rates.step_times)
        for chunk in result.prompt_logprobs:
            self._recorder.store_prompt_logprobs(chunk)
        self._recorder.record(step, result, self._ahead)
        return self._recorder.take_deltas()

    def take_deltas(self) -> list[SequenceDelta]:
        """Return, once, what has been recorded."""
        return self._recorder.take_deltas()

    def _complete(self, request: Request, sequence: Sequence) -> None:
        """Finish a sequence that has its last token. A pin request keeps its blocks, which do not hold that token."""
        if isinstance(request.task, PinTask):
            self.cache.pin(request.request_id, sequence.seq_id)
        self._finish(request, sequence)

    def roll_back(self) -> list[int]:
        """Roll back a failed step: the affected requests are queued again, in order, and recomputed.

        What the step may have written is not trusted, in the swap space either. A request that was swapped out before,
        and did not return in this step, stays as it is; requests without a part in the step run on. Returns the ids of
        the suspects: all affected requests, or the one being planned or recorded, if the failure arose there.
        """
        steps = [self.step] if self._ahead is None else [self.step, self._ahead]
        at, self._ahead = self.step.at, None
        affected = _affected_by(steps, self.queues.running, self.cache)
        _release_affected(affected, self.step.swapped_out, self.queues, self.preemption)
        self.cache.end_step()
        if self.cache.states is not None:
            self.cache.states.end_failed()
        if self.planner.images is not None:
            self.planner.images.undo(steps)
        return [request.request_id for request in (affected if at is None else [at])]

    # --- isolation: see quire.scheduling.isolation --------------------------------------------------------------------

    def requeue_running(self) -> None:
        """Preempt all running requests by recompute. Only between steps, and with none planned ahead."""
        assert self._ahead is None, "a step is planned ahead"
        _release_affected(self.queues.running.copy(), [], self.queues, self.preemption)

    def hold_all_but(self, request_ids: Collection[int]) -> None:
        """Keep all requests but these out of steps until the next call, or `release_all`."""
        self.queues.hold_all_but(request_ids)

    def release_all(self) -> None:
        """Let all requests take part in steps again."""
        self.queues.release_all()

    # --- invariants -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert what must hold between steps."""
        run_to_the_end(self.checking())

    def checking(self) -> Iterator[None]:
        """Do what `check` does in slices of about a millisecond, for an idle engine; drop it when anything changes."""
        yield from self.cache.checking()
        self.queues.check()
        assert self.queues.num_running_seqs <= self.config.max_num_seqs
        _check_running(self.queues.running, self._ahead, self.cache)
        self._deadlines.check()
        if self.planner.images is not None:
            self.planner.images.check()
        self._searches.check(self.queues.requests.values())
        check_pinned(self.queues.requests.values(), self.cache, self.limits)


def _plan_states(step: PlanBuilder, states: States) -> None:
    """Plan the states of a step's entries, which are complete.

    Drafts are not certain, and neither is the last known token of a row with a mask that may be late.
    """
    plan = step.plan
    num_drafts = {each.row: len(each.token_ids) for each in plan.drafts}
    late = {
        branch.seq_id for request, _ in step.sampled if request.params.structured_outputs is not None
        for branch in request.live
    }  # fmt: skip
    plan.states.extend(states.plan([
        PlannedEntry(
            sequence.seq_id, start, start + count - num_drafts.get(row, 0), sequence.num_prompt_tokens,
            sequence.seq_id in late,
        )
        for sequence, row, start, count in zip(step.planned, plan.rows, plan.starts, plan.counts, strict=True)
    ]))  # fmt: skip


def _check_running(running: Iterable[Request], ahead: PlanBuilder | None, cache: KVCacheManager) -> None:
    """Assert that running sequences have slots for computed and planned tokens, and have more to compute."""
    planned = {} if ahead is None else dict(zip(ahead.plan.rows, ahead.plan.counts, strict=True))
    for request in running:
        for sequence in request.live:
            if sequence.row != NO_ROW:
                num_tokens = cache.num_tokens(sequence.seq_id) - planned.get(sequence.row, 0)
                assert num_tokens == sequence.num_computed_tokens <= sequence.num_tokens
        waits = [sequence.is_computed for sequence in request.live]
        assert not any(waits) or (isinstance(request.task, BeamTask) and not all(waits)), "nothing left to compute"


def _affected_by(steps: list[PlanBuilder], running: Iterable[Request], cache: KVCacheManager) -> list[Request]:
    """Return the running requests that a step admitted, computes or starts, or that hold a block it copies into."""
    at = [request for step in steps for request in (step.at, *step.admitted)]
    plans = [step.plan for step in steps]
    rows = {row for plan in plans for row in (*plan.rows, *(new.row for new in plan.new_rows))}
    rows |= {fork.row for plan in plans for fork in plan.row_forks}
    copied = {copy.dst for plan in plans for copy in plan.copies}

    def is_affected(request: Request) -> bool:
        held = [sequence for sequence in request.live if sequence.row != NO_ROW]
        return request in at or any(
            each.row in rows or not copied.isdisjoint(cache.block_ids(each.seq_id)) for each in held
        )

    return [request for request in running if is_affected(request)]


def _release_affected(
    affected: list[Request], swapped_out: Iterable[Request], queues: RequestQueues, preemption: PreemptionPolicy
) -> None:
    """Queue affected requests again, those that the step was to swap out included, without their blocks."""
    for request in reversed(affected):
        preemption.count("recompute")
        queues.release_for_recompute(request)
    for request in swapped_out:
        if request in queues.swapped:                                   # else it was aborted while the step ran
            queues.release_for_recompute(request)


def make_scheduler(
    config: SchedulerConfig, cache_config: CacheConfig,
    unprepared: Callable[[Request], Lack | None] = lambda request: None,
) -> Scheduler:  # fmt: skip
    """Return the scheduler over its cache; one without paging or with static batches is an entry point."""
    if cache_config.has_blocks and (config.batching == "static" or cache_config.memory_policy != "paged"):
        return load(SCHEDULERS, "contiguous")(config, cache_config, unprepared)  # type: ignore[no-any-return]
    return Scheduler(config, make_cache(cache_config), unprepared=unprepared)


def make_cache(config: CacheConfig) -> KVCacheManager:
    """Return a paged cache with the prefix cache that its configuration asks for, or one without blocks."""
    if not config.has_blocks:
        return UncachedManager(config)
    return KVCacheManager(config, PrefixCache(config) if config.enable_prefix_caching else Prefixes(config))
