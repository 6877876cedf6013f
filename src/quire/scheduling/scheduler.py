"""The scheduler: waiting and running requests become a `StepPlan`; a `StepResult` becomes their new state.

One rule and no phases: a sequence has known tokens and computed tokens, and a step advances the second toward the
first by at most the token budget. Chunked prefill, decoding, recomputation after a preemption and what is found in the
prefix cache all follow from it.

Requests are served in the order of their turns: by priority with ageing, first come, first served among equals. Every
running request is planned before any waiting one. When blocks run out, the last in order gives way as a whole; it is
computed again later, or swapped out and in (Kwon et al. 2023, section 4.5). While anything is swapped out nothing new
is let in. The first in order never gives way, and no request is accepted that could not finish alone: what is accepted
always finishes.
A waiting request whose next block is being computed in this step is passed over, and its seat is kept: in the next step
it finds that block.
Pure Python: no torch, no clock, no I/O.
"""

from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count

from quire.cache.block_pool import OutOfBlocksError
from quire.cache.contiguous import ContiguousManager
from quire.cache.manager import KVCacheManager
from quire.cache.prefix_cache import NO_MATCH, PrefixMatch
from quire.core.config import SchedulerConfig
from quire.core.outputs import SequenceDelta, WaitReason
from quire.core.plan import PromptLogprobsChunk, StepPlan, StepResult
from quire.core.seeds import branch_seed
from quire.core.sequence import NO_ROW, Request, Sequence, SequenceStatus
from quire.scheduling.beam_search import BeamSearches
from quire.scheduling.budget import LongPrompts
from quire.scheduling.entrance import Entrance
from quire.scheduling.hold_ups import HoldUps
from quire.scheduling.limits import AdmissionLimits
from quire.scheduling.pinning import check_pinnable, check_pinned, num_pinned_blocks
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.policies import ByPriority, RequestQueue, next_to_enter, turn_of
from quire.scheduling.recovery import RecoveryPolicy
from quire.scheduling.reservation import ReservingEntrance
from quire.scheduling.run_ahead import plan_ahead
from quire.scheduling.stops import finish_reason


class Scheduler:
    """Decides who runs in each step. The only writer of a sequence's tokens, computed tokens, row and status."""

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager) -> None:
        self.config = config
        self.cache = cache
        self.limits = AdmissionLimits(
            cache.num_blocks, cache.block_size, config.max_num_seqs, config.max_model_len
        )
        self.entrance = _make_entrance(config, cache)
        self.recovery = RecoveryPolicy(config.preemption_mode, cache.block_size)
        self.order = ByPriority()
        self.long_prompts = LongPrompts(config.max_num_batched_tokens, self._contenders)
        self.waiting = RequestQueue()
        self.swapped = RequestQueue()
        self.running: list[Request] = []                    # in the order of their turns
        self.admitted: list[Request] = []                   # by the last plan
        self.preempted: list[int] = []                      # by the last plan: ids of requests
        self.hold_ups = HoldUps()
        self._requests: dict[int, Request] = {}
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._seq_ids = count()
        self._builder = PlanBuilder()                       # of the step that is under way
        self._ahead: PlanBuilder | None = None              # of the step after it, if that has been planned already
        self._beams = BeamSearches(cache)

    # --- requests come and go -----------------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """Whether anything waits, runs or is swapped out."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError, and changes nothing, if it could never run."""
        assert request.request_id not in self._requests, f"request {request.request_id} added twice"
        num_prompt_tokens = len(request.prompt_token_ids)
        self.limits.check_admissible(num_prompt_tokens, request.max_tokens, request.params.n)
        if request.is_pin:
            check_pinnable(num_prompt_tokens, self._requests.values(), self.cache, self.limits)
        request.live = [
            Sequence(
                seq_id=next(self._seq_ids),
                index=index,
                seed=branch_seed(request.seed, index),
                token_ids=list(request.prompt_token_ids),
                num_prompt_tokens=num_prompt_tokens,
            )
            for index in range(request.params.n)
        ]
        request.turn = self.order.turn(request, request.live[0].seq_id)
        self.entrance.check_admissible(request)
        self._requests[request.request_id] = request
        self._beams.begin(request)
        self.hold_ups.begin(request)
        self.waiting.add(request)
        if request.is_pin:
            self._note_pins()

    def abort(self, request_id: int) -> bool:
        """End a request at once, wherever it is; its blocks are free on return. False if it is not here (any more).

        A prefix that it has pinned is unpinned.
        """
        request = self._requests.get(request_id)
        if request is None:
            return self._unpin(request_id)
        for sequence in list(request.live):
            self._end(request, sequence)
        return True

    def finish(self, request_id: int, index: int) -> bool:
        """End one branch, because its text is complete. False if it is not here (any more), or is a beam."""
        request = self._requests.get(request_id)
        sequence = next((s for s in request.live if s.index == index), None) if request else None
        if request is None or sequence is None or request.beam is not None:
            return False
        self._end(request, sequence)
        return True

    def _unpin(self, request_id: int) -> bool:
        is_here = self.cache.unpin(request_id)
        if is_here:
            self._note_pins()
        return is_here

    def _note_pins(self) -> None:
        num_pinned = num_pinned_blocks(self._requests.values(), self.cache)
        self.limits = replace(self.limits, num_pinned_blocks=num_pinned)

    # --- the plan -------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Choose who runs in the next step. The plan is empty only if nothing waits or runs.

        If it has been planned ahead, it is that plan, which has let nobody in.
        """
        if self._ahead is not None:
            self._builder, self._ahead, self.admitted = self._ahead, None, []
            return self._builder.plan
        self._builder = PlanBuilder()
        self._builder.plan.row_forks.extend(self._beams.take_row_forks())
        self._builder.plan.copies.extend(self.cache.take_copies())
        self.admitted, self.preempted = [], []
        self.entrance.open()
        self.hold_ups.open()
        self.long_prompts.open()
        self.order.note_step()
        if self._needs_prefixes():
            self.cache.publish()
        self.hold_ups.note(self._admit(self._plan_running(self.config.max_num_batched_tokens)))
        plan = self._builder.plan
        assert not plan.is_empty or not self._requests, "requests are here, but none of them can run"
        return plan

    def plan_ahead(self) -> StepPlan | None:
        """Return the step after the one under way, to be recorded after it; None where it cannot be planned yet."""
        request = next_to_enter(self.waiting, self.swapped)
        if self.cache.has_window or (request is not None and self.entrance.may_have_room(request)):
            return None
        budget = self.config.max_num_batched_tokens
        self._ahead = plan_ahead(self._builder, self.entrance.num_seats, budget, self.cache)
        if self._ahead is None:
            return None
        self.order.note_step()
        self._ahead.plan.row_forks.extend(self._beams.take_row_forks())
        self._ahead.plan.copies.extend(self.cache.take_copies())
        return self._ahead.plan

    def _needs_prefixes(self) -> bool:
        """Whether somebody may be let in and will look for prefixes, or blocks are short: none may be there twice."""
        request = next_to_enter(self.waiting, self.swapped)
        if request is not None and self.entrance.may_have_room(request):
            return True
        return self.cache.num_free_blocks < self.entrance.num_seats

    def _plan_running(self, budget: int) -> int:
        """Plan running requests in order. Return the budget left."""
        index = 0
        while budget > 0 and index < len(self.running):
            request = self.running[index]
            first = request.live[0]
            num_known = len(first.token_ids)
            if num_known - first.num_computed_tokens == 1 and len(request.live) == 1 and first.row != NO_ROW:
                used = self._advance(request, first, num_known, budget)  # what most requests of most steps are
            else:
                used = self._advance_others(request, budget)
            if used is None:
                break                                                   # the request itself, the last, was preempted
            budget -= used
            index += 1
        return budget

    def _contenders(self) -> Iterator[Request]:
        """Yield who could use some of this step's budget: who runs, and who may be let in next."""
        yield from self.running
        newcomer = next_to_enter(self.waiting, self.swapped)
        if newcomer is not None and self.entrance.may_have_room(newcomer):
            yield from self.swapped if len(self.swapped) > 0 else self.waiting

    def _advance_others(self, request: Request, budget: int) -> int | None:
        """Plan a prompt, which may be long, or a gang. What a prompt does not get in this step is promised to it."""
        mark = self._builder.mark()
        waits_to_fork, is_alone = request.live[-1].row == NO_ROW, len(request.live) == 1
        num_missing = self._num_missing(request)
        if waits_to_fork or is_alone:
            budget = self.long_prompts.share(num_missing, budget)
        used = self._advance_gang(request, budget) if budget > 0 else 0
        if used is None:
            self._builder.cut(mark)
        elif waits_to_fork or (is_alone and used < num_missing):
            self.entrance.promise(request)
        return used

    def _num_missing(self, request: Request) -> int:
        """Count what is to be computed before the branches of a request go their own ways."""
        first = request.live[0]
        target = len(first.token_ids) if len(request.live) == 1 else first.num_prompt_tokens
        return target - first.num_computed_tokens

    def _advance(self, request: Request, sequence: Sequence, target: int, budget: int) -> int | None:
        """Plan up to `budget` tokens of a sequence toward `target`. None if its own request had to be preempted."""
        num_tokens = min(target - sequence.num_computed_tokens, budget)
        while True:
            try:
                update = self.cache.append(sequence.seq_id, num_tokens)
                break
            except OutOfBlocksError:
                assert len(self.running) > 1, "the first in order is never preempted"
                victim = self.order.victim(self.running)
                self._preempt(victim)
                if victim is request:
                    return None
        self._builder.advance(sequence, num_tokens, update)
        if sequence.num_computed_tokens + num_tokens == len(sequence.token_ids):
            self._builder.sample(request, sequence)
        return num_tokens

    def _advance_gang(self, request: Request, budget: int) -> int | None:
        """Plan the branches of a request: first one computes the prompt for all, then each goes its own way."""
        if request.live[-1].row == NO_ROW:
            return self._advance_prompt(request, budget)
        left = budget
        for sequence in request.live:
            if left == 0:
                break
            if sequence.is_computed:
                continue                                                # a beam that waits for the others
            used = self._advance(request, sequence, len(sequence.token_ids), left)
            if used is None:
                return None
            left -= used
        return budget - left

    def _advance_prompt(self, request: Request, budget: int) -> int | None:
        """Plan the first branch up to the end of the prompt, where the others fork from it (section 4.4).

        A fork shares the blocks that this step fills; the first write to a shared one comes in a later step, so its
        copy finds them filled.
        """
        first, *others = request.live
        target = first.num_prompt_tokens if others else len(first.token_ids)
        if first.row == NO_ROW:
            self._begin(request, first, NO_MATCH)                       # its gang's first has ended before the fork
        used = self._advance(request, first, target, budget)
        if used is not None and first.num_computed_tokens + used == target:
            for other in others:
                self._fork(request, first, other)
        return used

    def _fork(self, request: Request, first: Sequence, other: Sequence) -> None:
        """Let `other` share all blocks of `first`, and draw its first token from the same logits if it has none."""
        self._give_row(other)
        self.cache.fork(first.seq_id, other.seq_id, other.token_ids)
        self._builder.begin_row(request, other, self.cache.block_ids(other.seq_id))
        self._builder.forked.append(other)
        self.recovery.note_recomputed(max(0, other.num_lost_tokens - other.num_prompt_tokens))
        other.num_lost_tokens = 0
        if other.num_output_tokens == 0 and request.beam is None:
            self._builder.sample(request, other)

    def _admit(self, budget: int) -> WaitReason | None:
        """Let swapped and waiting requests run, in order, while rows, blocks and budget last. Return what does not."""
        num_passed = 0
        while (request := next_to_enter(self.waiting, self.swapped, num_passed)) is not None:
            if budget <= 0:
                return "token_budget"
            if not self.entrance.may_have_room(request):
                return "swapped_first" if request in self.swapped else self.entrance.lacks(request)
            if request in self.swapped:
                if self.entrance.num_spare_blocks_on_return(request) < 0 and self.running:
                    return "swapped_first"
                budget -= self._return(request, budget)
                continue
            match = self.entrance.match(request)
            if match.is_pending:
                num_passed = self.waiting.num_up_to(request)
                self.entrance.pass_over(request)
                self.hold_ups.pass_over(request, "pending_prefix")
                continue
            num_spare = self.entrance.num_spare_blocks(request, match)
            if num_spare < 0 and self.running:                          # alone it fits: see AdmissionLimits
                return "kv_blocks"
            share = self.long_prompts.share(self._num_missing(request) - match.num_tokens, budget)
            if share == 0:
                if request.num_preemptions or not self.long_prompts.may_be_passed():
                    return "token_budget"                               # nobody takes the blocks of who gave way
                num_passed = self.waiting.num_up_to(request)
                self.hold_ups.pass_over(request, "token_budget")
                continue
            self._let_in(request)
            used = self._advance_admitted(request, match if num_spare > 0 else match.of_whole_blocks(), share)
            assert used is not None, "admitted without room"
            budget -= used
            self.entrance.promise(request)
        return None

    def _let_in(self, request: Request) -> None:
        """Move a request from its queue to those that run."""
        self._leave_queue(request)
        self.hold_ups.end(request)
        insort(self.running, request, key=turn_of)
        self.admitted.append(request)
        self.entrance.num_seats += len(request.live)

    def _return(self, request: Request, budget: int) -> int:
        """Swap a request in, and plan its next tokens. Return how many."""
        self._let_in(request)
        swapped = [sequence for sequence in request.live if sequence.status is SequenceStatus.SWAPPED]
        moves = self.cache.swap_in([sequence.seq_id for sequence in swapped])
        request.num_swapped_blocks += len(moves)
        self._builder.plan.swap_ins.extend(moves)
        for sequence in swapped:
            self._give_row(sequence)
            self._builder.begin_row(request, sequence, self.cache.block_ids(sequence.seq_id))
        used = self._advance_gang(request, budget)
        assert used is not None, "swapped in without room"
        self.entrance.promise(request)
        return used

    def _advance_admitted(self, request: Request, match: PrefixMatch, budget: int) -> int | None:
        """Begin with what has been found, and plan the first tokens.

        The branches of a preempted gang go their own ways at once if their prompt has been found.
        """
        first, *others = request.live
        self._begin(request, first, match)
        if request.num_preemptions == 0:
            request.num_cached_tokens = first.num_computed_tokens
            if request.params.prompt_logprobs is None:
                self.cache.note_query(first.num_prompt_tokens, first.num_computed_tokens)
        if first.num_output_tokens > 0 and self.entrance.has_prompt(request, match):
            for other in others:
                self._begin(request, other, self.entrance.match_sequence(request, other).of_whole_blocks())
        for other in others:                                            # that will fork have lost all but the prompt
            request.num_recomputed_tokens += max(0, other.num_lost_tokens - other.num_prompt_tokens)
        return self._advance_gang(request, budget)

    def _begin(self, request: Request, sequence: Sequence, match: PrefixMatch) -> None:
        """Give a sequence a row, and the tokens of a match."""
        self._give_row(sequence)
        copy = self.cache.create(
            sequence.seq_id, sequence.token_ids, request.cache_salt, match,
            keeps_all=request.is_pin, num_reserved=self.entrance.num_reserved(request),
        )
        sequence.num_computed_tokens = self.cache.num_tokens(sequence.seq_id)
        num_recomputed = max(0, sequence.num_lost_tokens - sequence.num_computed_tokens)
        self.recovery.note_recomputed(num_recomputed)
        request.num_recomputed_tokens += num_recomputed
        sequence.num_lost_tokens = 0
        self._builder.begin_row(request, sequence, self.cache.block_ids(sequence.seq_id), copy)

    # --- the result -----------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceDelta]:
        """Record a step: append its tokens, end what has reached its end, free what that held."""
        assert plan is self._builder.plan, "a result for another plan"
        for sequence, num_tokens in zip(self._builder.planned, plan.counts, strict=True):
            sequence.num_computed_tokens += num_tokens
        for sequence in self._builder.forked:
            sequence.num_computed_tokens = sequence.num_prompt_tokens
        deltas = self._fail(result.failures) if result.failures else []
        self.cache.end_step()
        self.recovery.note_step(result)
        for chunk in result.prompt_logprobs:
            self._take_prompt_logprobs(chunk)
        logprobs = result.logprobs or [None] * len(result.token_ids)
        for (request, sequence), token, token_logprobs in zip(
            self._builder.sampled, result.token_ids, logprobs, strict=True
        ):
            if sequence.status is not SequenceStatus.RUNNING:
                continue                                                # has failed, was aborted meanwhile, or padding
            if request.beam is not None:
                self._beams.answer(request, sequence, token_logprobs)
                continue
            sequence.token_ids.append(token)
            delta = SequenceDelta(request.request_id, sequence.index, [token])
            if token_logprobs is not None:
                delta.logprobs = [token_logprobs]
            if request.prompt_logprobs and sequence.num_output_tokens == 1 and sequence.index == 0:
                delta.prompt_logprobs = request.prompt_logprobs
            delta.finish_reason, delta.stop_reason = finish_reason(request, sequence)
            if delta.finish_reason is not None:
                if request.is_pin:
                    self.cache.pin(request.request_id, sequence.seq_id)  # without the token, which nobody wants
                self._complete(request, sequence)
            deltas.append(delta)
        for request, answers in self._beams.advance():
            for sequence in list(request.live):
                self._end(request, sequence)
            deltas += answers
        return deltas

    def _complete(self, request: Request, sequence: Sequence) -> None:
        """Let go of a sequence that has reached its end by itself."""
        self._end(request, sequence)

    def _fail(self, failures: Mapping[int, str]) -> list[SequenceDelta]:
        """End the requests that own these rows, for the reasons given. Nobody shall find what they have computed."""
        deltas = []
        for request in [r for r in self.running if any(sequence.row in failures for sequence in r.live)]:
            index, why = next((s.index, failures[s.row]) for s in request.live if s.row in failures)
            for sequence in list(request.live):
                self.cache.distrust(sequence.seq_id)
                sequence.num_computed_tokens = 0
                self._end(request, sequence)
            deltas.append(SequenceDelta(request.request_id, index, [], error=why))
        return deltas

    def undo(self) -> list[int]:
        """Take back a plan whose step failed: what runs is queued again, in its order, and will be computed anew.

        Nobody knows how far the step came, so nothing that it wrote is trusted, in the swap space either. What was
        swapped out before, and did not come back in this step, is as it was. Returns the ids of the requests that ran.
        """
        ran = [request.request_id for request in self.running]
        self._ahead = None
        for request in self.running[::-1]:
            self.recovery.count("recompute")
            request.num_preemptions += 1
            self._lose(request)
        for request in self._builder.swapped_out:
            if request in self.swapped:                                 # else it was aborted while the step ran
                self._lose(request)
        self.cache.end_step()
        return ran

    def _take_prompt_logprobs(self, chunk: PromptLogprobsChunk) -> None:
        """Keep the logprobs of prompt positions that were not known yet: a recomputed prompt brings them again."""
        request = next((r for r in self.running if any(s.row == chunk.row for s in r.live)), None)
        if request is None:
            return                                                      # aborted while the step ran
        known = 1 + len(request.prompt_logprobs)
        request.prompt_logprobs.extend(chunk.tokens[max(0, known - chunk.start) :])

    # --- rows and blocks ------------------------------------------------------------------------------------------

    def _give_row(self, sequence: Sequence) -> None:
        sequence.row = self._free_rows.pop()
        sequence.status = SequenceStatus.RUNNING

    def _take_back(self, sequence: Sequence) -> None:
        """Free the row and the blocks of a sequence, if it has any."""
        if sequence.row != NO_ROW or sequence.status is SequenceStatus.SWAPPED:
            self.cache.free(sequence.seq_id, sequence.num_computed_tokens)
        if sequence.row != NO_ROW:
            self._free_row(sequence)

    def _free_row(self, sequence: Sequence) -> None:
        self._free_rows.append(sequence.row)
        sequence.row = NO_ROW

    def _end(self, request: Request, sequence: Sequence) -> None:
        """End a branch for good; with the last one the request ends."""
        is_running = request in self.running
        self._take_back(sequence)
        sequence.status = SequenceStatus.FINISHED
        request.live.remove(sequence)
        self.entrance.num_seats -= is_running
        if not request.live:
            del self._requests[request.request_id]
            self._beams.end(request)
            self._leave_queue(request)
            if request.is_pin:
                self._note_pins()

    def _leave_queue(self, request: Request) -> None:
        """Take a request out of where it stands: the running, the swapped or the waiting ones."""
        if request in self.running:
            self.running.remove(request)
            self.entrance.num_seats -= len(request.live)
        elif request in self.swapped:
            self.swapped.remove(request)
        else:
            self.waiting.remove(request)

    def _preempt(self, request: Request) -> None:
        """Take everything from a running request, to come back in one way or the other.

        Some of its branches may have been planned in this very step: that is taken back first.
        """
        held = [sequence for sequence in request.live if sequence.row != NO_ROW]
        for sequence in held:
            self.cache.retract(sequence.seq_id, sequence.num_computed_tokens)
        request.num_preemptions += 1
        request.num_recomputed_tokens = request.num_swapped_blocks = 0
        self.preempted.append(request.request_id)
        footprint = self.cache.footprint([sequence.seq_id for sequence in held])
        if self.recovery.choose(request, footprint, self.cache.num_free_swap_blocks) == "swap":
            self._swap_out(request, held)
        else:
            self._lose(request)

    def _swap_out(self, request: Request, held: list[Sequence]) -> None:
        """Queue a running request among the swapped ones; its computed tokens stay computed."""
        moves = self.cache.swap_out([sequence.seq_id for sequence in held])
        request.num_swapped_blocks = len(moves)
        self._builder.plan.swap_outs.extend(moves)
        self._builder.swapped_out.append(request)
        for sequence in held:
            self._free_row(sequence)
            sequence.status = SequenceStatus.SWAPPED
        self._leave_queue(request)
        self.hold_ups.begin(request)
        self.swapped.add(request)

    def _lose(self, request: Request) -> None:
        """Free all that a request holds and queue it again; what is not found then will be computed anew."""
        for sequence in request.live:
            self._take_back(sequence)
            sequence.num_lost_tokens = max(sequence.num_lost_tokens, sequence.num_computed_tokens)
            sequence.num_computed_tokens = 0
            sequence.status = SequenceStatus.WAITING
        self._leave_queue(request)
        self.hold_ups.begin(request)
        self.waiting.add(request)

    # --- invariants -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert what must hold between steps. For tests, and for an idle engine."""
        self.cache.check()
        turns = [request.turn for request in self.running]
        assert turns == sorted(turns), "running requests are out of order"
        sequences = [sequence for request in self.running for sequence in request.live]
        assert self.entrance.num_seats == len(sequences) <= self.config.max_num_seqs
        rows = [sequence.row for sequence in sequences if sequence.row != NO_ROW]
        assert sorted(rows + self._free_rows) == list(range(self.config.max_num_seqs)), "rows lost or doubled"
        for sequence in sequences:
            assert (sequence.row != NO_ROW) == (sequence.status in {SequenceStatus.RUNNING, SequenceStatus.PADDING})
            if sequence.row != NO_ROW:
                num_ahead = self._ahead is not None and sequence in self._ahead.planned
                num_tokens = self.cache.num_tokens(sequence.seq_id) - num_ahead
                assert num_tokens == sequence.num_computed_tokens <= sequence.num_tokens
        for request in self.running:
            waits = [sequence.is_computed for sequence in request.live]
            assert not any(waits) or (request.beam is not None and not all(waits)), "nothing left to compute"
        self._beams.check(self._requests.values())
        assert len(self.running) + len(self.waiting) + len(self.swapped) == len(self._requests)
        check_pinned(self._requests.values(), self.cache, self.limits)


def _make_entrance(config: SchedulerConfig, cache: KVCacheManager) -> Entrance:
    if isinstance(cache, ContiguousManager):
        return ReservingEntrance(cache, config.max_num_seqs, config.max_model_len)
    return Entrance(cache, config.max_num_seqs)
