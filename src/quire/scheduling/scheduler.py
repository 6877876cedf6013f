"""The scheduler: waiting and running requests become a `StepPlan`; a `StepResult` becomes their new state.

One rule and no phases: a sequence has known tokens and computed tokens, and a step advances the second toward the
first by at most the token budget. Chunked prefill, decoding, recomputation after a preemption and what is found in the
prefix cache all follow from it.

Requests are served in the order of a policy: by priority with ageing, by arrival, or by shares of clients. While
anything is swapped out nothing new is admitted. The first in order is never preempted, and no request is accepted that
could not finish alone: every accepted request finishes. `RequestQueues` has the queues, `Planner` writes plans.
Pure Python: no torch, no clock, no I/O.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count

from quire.cache.manager import KVCacheManager
from quire.cache.slices import run_to_the_end
from quire.core.config import SchedulerConfig
from quire.core.deltas import PREPARATION, SequenceDelta, WaitReason
from quire.core.errors import InvalidRequestError
from quire.core.plan import StepPlan, StepResult
from quire.core.seeds import branch_seed
from quire.core.sequence import NO_ROW, Request, Sequence
from quire.core.task import BeamSearch, Pin
from quire.core.token_ids import TokenIds, pack_tokens
from quire.scheduling.admission import AdmissionControl
from quire.scheduling.async_scheduling import must_see_tokens, schedule_next
from quire.scheduling.deadlines import DEADLINE, Deadlines, late_ends, late_failure
from quire.scheduling.limits import AdmissionLimits, check_pinnable, check_pinned, num_pinned_blocks
from quire.scheduling.parts import SchedulerParts, Searches
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.planner import Planner
from quire.scheduling.preemption import PreemptionPolicy, PreemptionStats
from quire.scheduling.queues import RequestQueues
from quire.scheduling.result_recorder import ResultRecorder
from quire.scheduling.step_rollback import affected_by, release_affected
from quire.scheduling.time_budget import TimeBudget
from quire.scheduling.waiting_lines import Lack


class Scheduler:
    """Chooses the requests of each step, and records the results. The only writer of a sequence's tokens.

    `unprepared` returns what a waiting request lacks of what is prepared for it by another thread; None: nothing.
    `parts`: those that the configuration asks for, and that requests may ask for; by default none.
    """

    def __init__(
        self, config: SchedulerConfig, cache: KVCacheManager, admission: type[AdmissionControl] = AdmissionControl,
        unprepared: Callable[[Request], Lack | None] = lambda request: None,
        parts: SchedulerParts | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.cache = cache
        self.limits = AdmissionLimits(
            cache.num_blocks, cache.block_size, config.max_num_seqs, config.max_model_len
        )
        parts = parts or SchedulerParts()
        self.order, self._make_searches = parts.order, parts.make_searches
        self.queues = RequestQueues(cache, config.max_num_seqs, self.order)
        self.admission = admission(self.queues, cache, config)
        self.preemption = PreemptionPolicy(config.preemption_mode, cache.block_size)
        make_shares = parts.make_shares
        self._shares = None if make_shares is None else make_shares(cache, self.running, self.admission)
        time = TimeBudget(config.itl_target_s, config.ttft_target_s, config.max_num_batched_tokens)
        self.planner = Planner(
            config, self.queues, self.admission, self.preemption, self.order, cache, self._shares, unprepared, time
        )
        self._step = PlanBuilder()                  # that is being planned, or is under way
        self._ahead: PlanBuilder | None = None      # the step after the one under way, if it has been planned already
        self._seq_ids = count()
        self._deadlines = Deadlines(self.queues.requests)
        self._recorder = ResultRecorder(cache, self.queues, self.order, self._finish, self._complete)

    # --- requests -----------------------------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """Return whether a request is unfinished, or a delta was not returned yet."""
        return bool(self.queues.requests or self._recorder.deltas)

    @property
    def requests(self) -> Mapping[int, Request]:
        """All unfinished requests by id."""
        return self.queues.requests

    @property
    def waiting(self) -> list[Request]:
        """Requests that wait to be admitted, in order."""
        return self.queues.waiting

    @property
    def running(self) -> list[Request]:
        """Admitted requests, in order."""
        return self.queues.running

    @property
    def swapped(self) -> list[Request]:
        """Requests that are swapped out, in order."""
        return self.queues.swapped

    @property
    def num_held(self) -> int:
        """Requests that wait, or are swapped out, and may not be admitted now."""
        return len(self.queues.held)

    @property
    def num_running_seqs(self) -> int:
        """Unfinished sequences of running requests."""
        return self.queues.num_running_seqs

    @property
    def wait_reason(self) -> WaitReason | None:
        """The reason for which the last plan did not admit the head of the waiting queue; None if none waits."""
        return self.queues.wait_reasons.current

    @property
    def num_deferred(self) -> int:
        """Waiting requests that lack something, or that the last plan skipped: those behind them could be admitted."""
        return self.queues.lines.num_lacking + self.queues.wait_reasons.num_skipped

    @property
    def time(self) -> TimeBudget:
        """The limit of a step's time, and what it has measured."""
        return self.planner.time

    @property
    def preemption_stats(self) -> PreemptionStats:
        """Preemptions since start, and their cost."""
        return self.preemption.stats

    @property
    def current_request(self) -> Request | None:
        """The request that is being planned or recorded; None between requests."""
        return self._step.at

    def num_reserved(self, request: Request) -> int:
        """Return how many tokens each sequence of a request reserves; 0 in paged memory."""
        return self.admission.num_reserved(request)

    @property
    def admitted(self) -> list[Request]:
        """Requests that the last plan admitted."""
        return self._step.admitted

    @property
    def preempted(self) -> list[int]:
        """The ids of requests that the last plan has preempted."""
        return self._step.preempted

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError, and changes nothing, if it could never run."""
        assert request.request_id not in self.queues.requests, f"request {request.request_id} added twice"
        num_prompt_tokens = len(request.prompt_token_ids)
        self.limits.check_admissible(num_prompt_tokens, request.max_tokens, request.params.n)
        if isinstance(request.task, Pin):
            check_pinnable(num_prompt_tokens, self.queues.requests.values(), self.cache, self.limits)
        searches = self._searches_for(request)
        prompt = pack_tokens(request.prompt_token_ids)
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
        self.admission.check_admissible(request)
        self.queues.add(request)
        self._deadlines.add(request)
        if searches is not None:
            searches.add(request)
        if isinstance(request.task, Pin):
            self._update_pin_limits()

    def _searches_for(self, request: Request) -> Searches | None:
        """Return the searches for a request that is one, the first time made for it; None for other requests."""
        if not isinstance(request.task, BeamSearch):
            return None
        if self._recorder.searches is None:
            if self._make_searches is None:
                raise InvalidRequestError("this scheduler has no beam search")
            self._recorder.searches = self._make_searches(self.cache, self.queues)
        return self._recorder.searches

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
        """End a request whose deadline has passed: with what it has, or with an error if that is nothing."""
        searches = self._recorder.searches
        if not request.has_begun:
            ends = [late_failure(request)]
        elif searches is not None and isinstance(request.task, BeamSearch):
            ends = searches.conclude(request)
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
        if request is None or sequence is None or isinstance(request.task, BeamSearch):
            return False
        self._finish(request, sequence)
        return True

    def _finish(self, request: Request, sequence: Sequence) -> None:
        """End a branch for good; with the last one the request ends."""
        self.queues.finish(request, sequence)
        if not request.live:
            if self._recorder.searches is not None:
                self._recorder.searches.remove(request)
            if isinstance(request.task, Pin):
                self._update_pin_limits()

    def _finish_all(self, request: Request) -> None:
        for sequence in list(request.live):
            self._finish(request, sequence)

    def _update_pin_limits(self) -> None:
        num_pinned = num_pinned_blocks(self.queues.requests.values(), self.cache)
        self.limits = replace(self.limits, num_pinned_blocks=num_pinned)

    # --- the plan -------------------------------------------------------------------------------------------------

    def schedule(self, now_s: float = 0.0) -> StepPlan:
        """Plan the next step. The plan is empty only if no request runs, and those that wait are being prepared.

        `now_s`: the time by the clock of `Request.arrived_s`. First, requests end whose deadlines have passed.
        Returns the plan of `schedule_next`, which admits no request, if there is one.
        """
        for request in self._deadlines.take_passed(now_s):
            self._end_late(request)
        if self._ahead is not None:
            self._step, self._ahead = self._ahead, None
            return self._step.plan
        step = self._step = PlanBuilder()
        self.planner.start_step(now_s)
        plan = self._start_step(step)
        self.planner.preempt_excess(step)
        self._admit(step, self.planner.plan_running(step, self.config.max_num_batched_tokens))
        step.at = None
        if self.queues.num_drafted:
            self._plan_drafts(step)
        is_idle = not self.queues.requests or self.wait_reason in PREPARATION
        assert not plan.is_empty or is_idle, "requests are here, but none of them can run"
        return plan

    def schedule_next(self) -> StepPlan | None:
        """Return the step after the one under way, to be recorded after it; None where it cannot be planned yet."""
        has_drafts = self.queues.num_drafted > 0 or self._step.plan.drafts
        if has_drafts or self.cache.has_window or self.admission.has_room_for_next():
            return None
        if self._shares is not None and self._shares.has_excess():
            return None
        self._ahead = schedule_next(
            self._step, self.running, self.queues.num_running_seqs, self.config.max_num_batched_tokens,
            self.cache, self.time,
        )
        return None if self._ahead is None else self._start_step(self._ahead)

    def _start_step(self, step: PlanBuilder) -> StepPlan:
        """Count a step, and put into its plan what the last one has left to do."""
        self.order.count_step()
        if self._recorder.searches is not None:
            step.plan.row_forks.extend(self._recorder.searches.take_row_forks())
        step.plan.copies.extend(self.cache.take_copies())
        return step.plan

    def _admit(self, step: PlanBuilder, budget: int) -> None:
        """Admit waiting requests that fit; count why the rest wait."""
        self.queues.wait_reasons.count(self.planner.admit(step, budget))

    def _plan_drafts(self, step: PlanBuilder) -> None:
        """Plan drafts from the remaining budget, unless a request waits for budget."""
        left = self.config.max_num_batched_tokens - step.num_tokens
        self.planner.plan_drafts(step, 0 if self.wait_reason == "token_budget" else left)

    # --- the result -----------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceDelta]:
        """Record a step: append its tokens, end what has reached its end, free what that held.

        If that fails, `take_deltas` has what had been recorded before, and so has the next update.
        """
        step = self._step
        assert plan is step.plan, "a result for another plan"
        if result.failures:
            self._recorder.fail(result.failures, result.at_fault)
        self._recorder.advance(step, result, self._ahead)
        self.cache.end_step()
        self.preemption.record_step(result)
        self.time.record(result.rates.step_times)
        for chunk in result.prompt_logprobs:
            self._recorder.store_prompt_logprobs(chunk)
        self._recorder.record(step, result, self._ahead)
        return self.take_deltas()

    def take_deltas(self) -> list[SequenceDelta]:
        """Return, once, what has been recorded."""
        return self._recorder.take_deltas()

    def _complete(self, request: Request, sequence: Sequence) -> None:
        """Finish a sequence that has its last token. A pin request keeps its blocks, which do not hold that token."""
        if isinstance(request.task, Pin):
            self.cache.pin(request.request_id, sequence.seq_id)
        self._finish(request, sequence)

    def roll_back(self) -> list[int]:
        """Roll back a failed step: the affected requests are queued again, in order, and recomputed.

        What the step may have written is not trusted, in the swap space either. A request that was swapped out before,
        and did not return in this step, stays as it is; requests without a part in the step run on. Returns the ids of
        the suspects: all affected requests, or the one being planned or recorded, if the failure arose there.
        """
        steps = [self._step] if self._ahead is None else [self._step, self._ahead]
        at, self._ahead = self._step.at, None
        affected = affected_by(steps, self.running, self.cache)
        release_affected(affected, self._step.swapped_out, self.queues, self.preemption)
        self.cache.end_step()
        return [request.request_id for request in (affected if at is None else [at])]

    # --- isolation: see quire.scheduling.isolation --------------------------------------------------------------------

    def requeue_running(self) -> None:
        """Preempt all running requests by recompute. Only between steps, and with none planned ahead."""
        assert self._ahead is None, "a step is planned ahead"
        release_affected(self.running.copy(), [], self.queues, self.preemption)

    def hold_all_but(self, request_ids: Container[int]) -> None:
        """Admit these requests only until `release_all`, while no other request runs. Call again after each arrival."""
        for request in [*self.waiting, *self.swapped]:
            if request.request_id not in request_ids:
                self.queues.hold(request)
        for request in [each for each in self.queues.held if each.request_id in request_ids]:
            self.queues.release(request)

    def release_all(self) -> None:
        """Admit all requests again that are held."""
        for request in self.queues.held.copy():
            self.queues.release(request)

    # --- invariants -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert what must hold between steps."""
        run_to_the_end(self.checking())

    def checking(self) -> Iterator[None]:
        """Do what `check` does in slices of about a millisecond, for an idle engine; drop it when anything changes."""
        yield from self.cache.checking()
        self.queues.check()
        assert self.queues.num_running_seqs <= self.config.max_num_seqs
        _check_running(self.running, self._ahead, self.cache)
        self._deadlines.check()
        if self._recorder.searches is not None:
            self._recorder.searches.check(self.queues.requests.values())
        check_pinned(self.queues.requests.values(), self.cache, self.limits)


def _check_running(running: Iterable[Request], ahead: PlanBuilder | None, cache: KVCacheManager) -> None:
    """Assert that running sequences have slots for computed and planned tokens, and have more to compute."""
    planned = {} if ahead is None else dict(zip(ahead.plan.rows, ahead.plan.counts, strict=True))
    for request in running:
        for sequence in request.live:
            if sequence.row != NO_ROW:
                num_tokens = cache.num_tokens(sequence.seq_id) - planned.get(sequence.row, 0)
                assert num_tokens == sequence.num_computed_tokens <= sequence.num_tokens
        waits = [sequence.is_computed for sequence in request.live]
        assert not any(waits) or (isinstance(request.task, BeamSearch) and not all(waits)), "nothing left to compute"
