"""The scheduler: waiting and running requests become a `StepPlan`; a `StepResult` becomes their new state.

One rule and no phases: a sequence has known tokens and computed tokens, and a step advances the second toward the
first by at most the token budget. Chunked prefill, decoding, recomputation after a preemption and what is found in the
prefix cache all follow from it.

Requests are served in the order of a policy: by priority with ageing, by arrival, or by shares of clients. While
anything is swapped out nothing new is let in. The first in order never gives way, and no request is accepted that could
not finish alone: what is accepted always finishes. `Roster` knows where each request stands, `Planner` writes plans.
Pure Python: no torch, no clock, no I/O.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from itertools import count, repeat

from quire.cache.contiguous import ContiguousManager
from quire.cache.manager import KVCacheManager
from quire.cache.slices import run_to_the_end
from quire.core.config import SchedulerConfig, SchedulingPolicy
from quire.core.outputs import SequenceDelta
from quire.core.plan import PromptLogprobsChunk, StepPlan, StepResult
from quire.core.seeds import branch_seed
from quire.core.sequence import Request, Sequence, SequenceStatus
from quire.core.token_ids import TokenIds, pack_tokens
from quire.scheduling.beam_search import BeamSearches
from quire.scheduling.entrance import Entrance
from quire.scheduling.failed_steps import check_running, concerned_by, lose
from quire.scheduling.fair_share import FairShare
from quire.scheduling.kv_shares import KVShares
from quire.scheduling.limits import AdmissionLimits
from quire.scheduling.pinning import check_pinnable, check_pinned, num_pinned_blocks
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.planner import Planner
from quire.scheduling.policies import ByPriority, FirstComeFirstServed
from quire.scheduling.recording import outcome
from quire.scheduling.recovery import RecoveryPolicy
from quire.scheduling.reservation import ReservingEntrance
from quire.scheduling.roster import Roster
from quire.scheduling.run_ahead import plan_ahead


class Scheduler:
    """Decides who runs in each step. The only writer of a sequence's tokens, computed tokens, row and status."""

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager) -> None:
        self.config = config
        self.cache = cache
        self.limits = AdmissionLimits(
            cache.num_blocks, cache.block_size, config.max_num_seqs, config.max_model_len
        )
        self.order = _make_order(config)
        self.roster = Roster(cache, config.max_num_seqs, self.order)
        self.waiting, self.running, self.swapped = self.roster.waiting, self.roster.running, self.roster.swapped
        self.hold_ups = self.roster.hold_ups
        self.entrance = _make_entrance(config, cache, self.roster)
        self.recovery = RecoveryPolicy(config.preemption_mode, cache.block_size)
        max_blocks = None if config.max_kv_share == 1 else int(config.max_kv_share * cache.num_blocks)
        self._shares = KVShares(max_blocks, self.running, self.entrance.known_blocks, self.entrance.head_room)
        self.planner = Planner(
            config.max_num_batched_tokens, self.roster, self.entrance, self.recovery, self.order, cache, self._shares
        )
        self._ahead: PlanBuilder | None = None      # the step after the one under way, if it has been planned already
        self._beams = BeamSearches(cache)
        self._seq_ids = count()
        self._deltas: list[SequenceDelta] = []      # recorded, and not told: an update that fails has told nothing

    # --- requests come and go -----------------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """Whether anything waits, runs or is swapped out, or is still to be told."""
        return bool(self.roster.requests or self._deltas)

    @property
    def admitted(self) -> list[Request]:
        """Requests that the last plan has let in."""
        return self.planner.step.admitted

    @property
    def preempted(self) -> list[int]:
        """The ids of requests that the last plan has preempted."""
        return self.planner.step.preempted

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError, and changes nothing, if it could never run."""
        assert request.request_id not in self.roster.requests, f"request {request.request_id} added twice"
        num_prompt_tokens = len(request.prompt_token_ids)
        self.limits.check_admissible(num_prompt_tokens, request.max_tokens, request.params.n)
        if request.is_pin:
            check_pinnable(num_prompt_tokens, self.roster.requests.values(), self.cache, self.limits)
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
        request.turn = self.order.turn(request, request.live[0].seq_id)
        self.entrance.check_admissible(request)
        self.order.add(request)
        self.roster.add(request)
        self._beams.begin(request)
        if request.is_pin:
            self._note_pins()

    def abort(self, request_id: int) -> bool:
        """End a request at once, wherever it is; its blocks are free on return. False if it is not here (any more).

        A prefix that it has pinned is unpinned.
        """
        request = self.roster.requests.get(request_id)
        if request is not None:
            self._end_all(request)
            return True
        is_pin = self.cache.unpin(request_id)
        if is_pin:
            self._note_pins()
        return is_pin

    def finish(self, request_id: int, index: int) -> bool:
        """End one branch, because its text is complete. False if it is not here (any more), or is a beam."""
        request = self.roster.requests.get(request_id)
        sequence = next((s for s in request.live if s.index == index), None) if request else None
        if request is None or sequence is None or request.beam is not None:
            return False
        self._end(request, sequence)
        return True

    def _end(self, request: Request, sequence: Sequence) -> None:
        """End a branch for good; with the last one the request ends."""
        self.roster.end(request, sequence)
        if not request.live:
            self.order.end(request)
            self._beams.end(request)
            if request.is_pin:
                self._note_pins()

    def _end_all(self, request: Request) -> None:
        for sequence in list(request.live):
            self._end(request, sequence)

    def _note_pins(self) -> None:
        num_pinned = num_pinned_blocks(self.roster.requests.values(), self.cache)
        self.limits = replace(self.limits, num_pinned_blocks=num_pinned)

    # --- the plan -------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Choose who runs in the next step. The plan is empty only if nothing waits or runs.

        If it has been planned ahead, it is that plan, which has let nobody in.
        """
        if self._ahead is not None:
            self.planner.step, self._ahead = self._ahead, None
            return self.planner.step.plan
        self.planner.open(step := PlanBuilder())
        plan = self._open(step)
        self.planner.preempt_excess()
        self._admit(self.planner.plan_running(self.config.max_num_batched_tokens))
        step.at = None
        assert not plan.is_empty or not self.roster.requests, "requests are here, but none of them can run"
        return plan

    def plan_ahead(self) -> StepPlan | None:
        """Return the step after the one under way, to be recorded after it; None where it cannot be planned yet."""
        if self.cache.has_window or self.entrance.has_room_for_next() or self._shares.has_excess():
            return None
        self._ahead = plan_ahead(
            self.planner.step, self.running, self.roster.num_seats, self.config.max_num_batched_tokens, self.cache
        )
        return None if self._ahead is None else self._open(self._ahead)

    def _open(self, step: PlanBuilder) -> StepPlan:
        """Count a step, and put into its plan what the last one has left to do."""
        self.order.note_step()
        step.plan.row_forks.extend(self._beams.take_row_forks())
        step.plan.copies.extend(self.cache.take_copies())
        return step.plan

    def _admit(self, budget: int) -> None:
        """Let those in that have room; take down what keeps out the others."""
        self.hold_ups.note(self.planner.admit(budget))

    # --- the result -----------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceDelta]:
        """Record a step: append its tokens, end what has reached its end, free what that held.

        If that fails, `take_deltas` has what had been recorded before, and so has the next update.
        """
        step = self.planner.step
        assert plan is step.plan, "a result for another plan"
        if result.failures:
            self._fail(result.failures)
        for sequence, num_tokens in zip(step.planned, plan.counts, strict=True):
            sequence.num_computed_tokens += num_tokens
        for sequence in step.forked:
            sequence.num_computed_tokens = sequence.num_prompt_tokens
        self.cache.end_step()
        self.recovery.note_step(result)
        for chunk in result.prompt_logprobs:
            self._take_prompt_logprobs(chunk)
        self.order.charge_outputs(step.sampled)
        self._record(step, result)
        return self.take_deltas()

    def take_deltas(self) -> list[SequenceDelta]:
        """Return, once, what has been recorded."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def _record(self, step: PlanBuilder, result: StepResult) -> None:
        """Give each sequence its token, each search its answers. For a failure whoever's turn it is answers alone."""
        logprobs, is_running = result.logprobs or repeat(None, len(result.token_ids)), SequenceStatus.RUNNING
        request: Request | None = None
        deltas = self._deltas
        try:
            for (request, sequence), token, candidates in zip(step.sampled, result.token_ids, logprobs, strict=True):
                if sequence.status is not is_running:
                    continue                                            # has failed, was aborted meanwhile, or padding
                if request.beam is not None:
                    self._beams.answer(request, sequence, candidates)
                    continue
                delta = outcome(request, sequence, token, candidates)
                if delta.finish_reason is not None:
                    if request.is_pin:
                        self.cache.pin(request.request_id, sequence.seq_id)  # without the token, which nobody wants
                    self._complete(request, sequence)
                sequence.token_ids.output.append(token)
                deltas.append(delta)
            for request in self._beams.take_answered():
                if answers := self._beams.advance(request):
                    self._end_all(request)
                    deltas += answers
        except BaseException:
            step.at = request
            raise

    def _complete(self, request: Request, sequence: Sequence) -> None:
        """Let go of a sequence that has reached its end by itself."""
        self._end(request, sequence)

    def _fail(self, failures: Mapping[int, str]) -> None:
        """End the requests that own these rows, for the reasons given. Nobody shall find what they have computed."""
        for request in [r for r in self.running if any(sequence.row in failures for sequence in r.live)]:
            index, why = next((s.index, failures[s.row]) for s in request.live if s.row in failures)
            for sequence in list(request.live):
                self.cache.distrust(sequence.seq_id)
                sequence.num_computed_tokens = 0
                self._end(request, sequence)
            self._deltas.append(SequenceDelta(request.request_id, index, [], error=why))

    def _take_prompt_logprobs(self, chunk: PromptLogprobsChunk) -> None:
        """Keep the logprobs of prompt positions that were not known yet: a recomputed prompt brings them again."""
        request = next((r for r in self.running if any(s.row == chunk.row for s in r.live)), None)
        if request is None:
            return                                                      # aborted while the step ran
        known = 1 + len(request.prompt_logprobs)
        request.prompt_logprobs.extend(chunk.tokens[max(0, known - chunk.start) :])

    def undo(self) -> list[int]:
        """Take back a step that has failed: whom it concerned is queued again, in order, and will be computed anew.

        Nobody knows how far the step came, so nothing that it wrote is trusted, in the swap space either. What was
        swapped out before, and did not come back in this step, is as it was; who had no part in the step runs on.
        Returns the ids of those who answer for it: all whom it concerned, or, where it failed while the plan was made
        or tokens were recorded, the one whose turn it was.
        """
        steps = [self.planner.step] if self._ahead is None else [self.planner.step, self._ahead]
        at, self._ahead = self.planner.step.at, None
        concerned = concerned_by(steps, self.running, self.cache)
        lose(concerned, self.planner.step.swapped_out, self.roster, self.recovery)
        self.cache.end_step()
        return [request.request_id for request in (concerned if at is None else [at])]

    # --- isolation: see quire.scheduling.isolation --------------------------------------------------------------------

    def requeue_running(self) -> None:
        """Preempt all running requests by recompute. Only between steps, and with none planned ahead."""
        assert self._ahead is None, "a step is planned ahead"
        lose(self.running.copy(), [], self.roster, self.recovery)

    def hold_all_but(self, request_ids: Container[int]) -> None:
        """Admit none but these requests until `release_all`; the others must not run. Again after each arrival."""
        for request in [*self.waiting, *self.swapped]:
            if request.request_id not in request_ids:
                self.roster.hold(request)
        for request in [each for each in self.roster.held if each.request_id in request_ids]:
            self.roster.release(request)

    def release_all(self) -> None:
        """Admit all requests again that are held."""
        for request in self.roster.held.copy():
            self.roster.release(request)

    # --- invariants -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert what must hold between steps."""
        run_to_the_end(self.checking())

    def checking(self) -> Iterator[None]:
        """Do what `check` does in slices of about a millisecond, for an idle engine; drop it when anything changes."""
        yield from self.cache.checking()
        self.roster.check()
        assert self.roster.num_seats <= self.config.max_num_seqs
        check_running(self.running, self._ahead, self.cache)
        self._beams.check(self.roster.requests.values())
        check_pinned(self.roster.requests.values(), self.cache, self.limits)


def _make_entrance(config: SchedulerConfig, cache: KVCacheManager, roster: Roster) -> Entrance:
    if isinstance(cache, ContiguousManager):
        return ReservingEntrance(roster, cache, config.max_num_seqs, config.max_model_len)
    return Entrance(roster, cache, config.max_num_seqs)


def _make_order(config: SchedulerConfig) -> ByPriority:
    orders: dict[SchedulingPolicy, type[ByPriority]] = {
        "priority": ByPriority, "fcfs": FirstComeFirstServed, "fair": FairShare,
    }  # fmt: skip
    return orders[config.scheduling_policy]()
