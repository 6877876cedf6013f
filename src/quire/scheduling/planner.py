"""Planner: the sequences of a step and their token counts. Running requests are planned first, then waiting ones.

When blocks run out, the last request in planning order is preempted as a whole, to be recomputed or swapped (Kwon et
al. 2023, section 4.5); the first is never preempted. Waiting requests are admitted while rows, blocks and budget last.
A request that starts with a block computed in this step is skipped, its rows reserved: in the next step it finds that
block in the prefix cache. A request that waits for its grammar to be compiled, or for its adapter, is set aside
(`quire.scheduling.waiting_lines`), and reserves nothing.
"""

from collections.abc import Callable, Iterable
from operator import attrgetter

from quire.cache.block_pool import OutOfBlocksError
from quire.cache.block_table import TableUpdate
from quire.cache.loads import Wanted
from quire.cache.manager import KVCacheManager
from quire.cache.prefix_tree import NO_MATCH, PrefixMatch
from quire.core.config import SchedulerConfig
from quire.core.deltas import WaitReason
from quire.core.plan import BlockCopy
from quire.core.pooling import BeamTask, PinTask, Pool
from quire.core.sequence import NO_ROW, Request, Sequence
from quire.scheduling.admission import AdmissionControl
from quire.scheduling.image_encodings import ImageEncodings
from quire.scheduling.kv_shares import KVShares
from quire.scheduling.plan_builder import PlanBuilder, PlannedDrafts
from quire.scheduling.preemption import PreemptionPolicy
from quire.scheduling.queues import RequestQueues
from quire.scheduling.time_budget import ChunkedPrefillBudget, TimeBudget, WholePrompts, decodes
from quire.scheduling.waiting_lines import ByPriority, Lack, LineReader

_SEQ_ID, _NUM_COMPUTED_TOKENS = attrgetter("seq_id"), attrgetter("num_computed_tokens")
KV_LOAD = Lack("kv_load")
_DECODES_AT_ONCE = 256  # requests that each run of decodes looks at, at most: decodes and groups may alternate


class SelfPreemptedError(Exception):
    """The request being planned was itself the victim."""


class Planner:
    """Writes plans: moves requests between queues, allocates and frees their blocks."""

    def __init__(
        self, config: SchedulerConfig, queues: RequestQueues, admission: AdmissionControl, preemption: PreemptionPolicy,
        order: ByPriority, cache: KVCacheManager, unprepared: Callable[[Request], Lack | None],
    ) -> None:  # fmt: skip
        self._unprepared = unprepared
        self._queues, self._admission, self._preemption = queues, admission, preemption
        self._order, self._cache = order, cache
        self.images: ImageEncodings | None = None       # None: the model reads text alone
        budget = ChunkedPrefillBudget if config.chunks_prompts else WholePrompts
        self.time = TimeBudget(config.itl_target_s, config.ttft_target_s, config.max_num_batched_tokens)
        self._prefill_budget = budget(config.max_num_batched_tokens, queues.running, self._admissible, self.time)
        self._shares: KVShares | None = None            # None: clients have no limit
        if config.max_kv_share < 1 and cache.num_blocks > 0:
            max_blocks = int(config.max_kv_share * cache.num_blocks)
            self._shares = KVShares(max_blocks, queues.running, admission.known_blocks, admission.head_room)

    def start_step(self, step: PlanBuilder) -> None:
        """Reset what is counted per step, and preempt by recompute what takes clients past their shares."""
        self._admission.start_step()
        self._queues.wait_reasons.start_step()
        if self._cache.prefixes.can_be_found:
            queues, cache = self._queues, self._cache
            has_waiting = queues.waiting or queues.swapped
            if (has_waiting and self._admission.may_admit()) or cache.num_free_blocks < queues.num_running_seqs:
                cache.publish()                         # merges duplicates: a lookup follows, or blocks are short
        if self._shares is not None:
            self._shares.start_step()
            for request in self._shares.excess():
                step.preempted.append(request.request_id)
                self._preemption.count("recompute")
                self._queues.release_for_recompute(request)

    def _admissible(self) -> Iterable[Request]:
        """Return the requests that could be admitted by this step."""
        return self._queues.swapped or self._queues.lines.new if self._admission.may_admit() else ()

    def has_excess(self) -> bool:
        """Return whether a client holds more than its share of the blocks."""
        return self._shares is not None and self._shares.has_excess()

    # --- running requests -----------------------------------------------------------------------------------------

    def plan_running(self, step: PlanBuilder, last: PlanBuilder, budget: int) -> int:
        """Plan running requests in order. Return the budget left. `last`: the step before, recorded or failed.

        If decodes that a prompt waited for were preempted, it takes the time that was theirs.
        """
        running = self._queues.running
        step.order = self._order.planning_order(running) if self._order.orders_running else running.copy()
        if last.repeated_by(step.order) and len(step.order) <= budget:
            return budget - self._plan_decodes(step, 0, last.planned.copy())
        budget = self._plan_in_order(step, budget)
        if not step.num_tokens and running and self._prefill_budget.lift(step):
            step.order = self._order.planning_order(running)
            budget = self._plan_in_order(step, budget)
        return budget

    def _plan_in_order(self, step: PlanBuilder, budget: int) -> int:
        running, index = step.order, 0
        try:
            while budget > 0 and index < len(running):
                step.at = running[index]
                if decodes := _decodes(running, index, budget):
                    num_planned = self._plan_decodes(step, index, decodes)
                    budget -= num_planned
                    index += num_planned
                else:
                    budget -= self._advance_share(step, running[index], budget)
                    index += 1
        except SelfPreemptedError:
            pass            # planned as far as blocks last: the victim is the last in order, nothing is left behind it
        return budget

    def _plan_decodes(self, step: PlanBuilder, index: int, sequences: list[Sequence]) -> int:
        """Plan one token of each of these, all at once. Return how many: the last ones may be preempted."""
        running, updates = step.order, dict[int, TableUpdate | None]()
        step.at = None
        try:
            places, updates = self._cache.append_where_room(map(_SEQ_ID, sequences))
            for place in places:
                if index + place >= len(running):
                    break                                               # preempted meanwhile
                step.at = running[index + place]
                updates[place] = self._append(step, step.at, sequences[place], 1)
        except SelfPreemptedError:
            pass            # as in `plan_running`; the sequences before it are planned below
        finally:
            del sequences[len(running) - index :]
            requests = running[index : index + len(sequences)]
            step.decode(requests, sequences, map(_NUM_COMPUTED_TOKENS, sequences), updates)
        return len(sequences)

    def _advance_share(self, step: PlanBuilder, request: Request, budget: int) -> int:
        """Plan a prompt, which may be long, or a group. Reserve blocks for the rest of the prompt."""
        mark, num_missing = step.mark(), num_missing_tokens(request)
        waits_to_fork, is_alone = request.live[-1].row == NO_ROW, len(request.live) == 1
        budget = self._share(step, request, budget)
        try:
            used = self._advance_group(step, request, budget) if budget > 0 else 0
        except SelfPreemptedError:
            step.cut(mark)
            raise
        if waits_to_fork or (is_alone and (used < num_missing or request.images)):  # with images, `used` has their cost
            self._admission.reserve(request)
        return used

    def _share(self, step: PlanBuilder, request: Request, budget: int) -> int:
        """Return how many tokens of what is left of the budget a running request may compute: all, if it decodes."""
        live, num_missing = request.live, num_missing_tokens(request)
        if live[-1].row != NO_ROW:
            if all(map(decodes, live)):
                return budget
            num_missing = sum(sequence.num_tokens - sequence.num_computed_tokens for sequence in live)
        return self._prefill_budget.share(step, request, num_missing, budget, live[0].num_computed_tokens)

    def _advance_group(self, step: PlanBuilder, request: Request, budget: int) -> int:
        """Plan the branches of a request, up to `budget` tokens in all. Return how many.

        First one branch computes the prompt for all, then the other branches fork from it (section 4.4). A fork
        shares the blocks that this step fills; the first write to a shared one comes in a later step, so its copy finds
        them filled. From then on each branch computes its own tokens.
        """
        first, *rest = request.live
        if request.live[-1].row == NO_ROW:
            if first.row == NO_ROW:
                self._start(step, request, first, NO_MATCH)             # the group's first has ended before the fork
            num_missing, cost = num_missing_tokens(request), 0
            used = min(num_missing, budget)
            if request.images:
                used, cost = self._encode(step, request, first, used, budget)
            if used:
                self._advance(step, request, first, used)
            if used == num_missing:
                for other in rest:
                    self._fork(step, request, first, other)
            return used + cost
        left = budget
        for sequence in request.live:
            num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, left)
            if request.images and num_tokens > 0:
                num_tokens, cost = self._encode(step, request, sequence, num_tokens, left)
                left -= cost
            if num_tokens > 0:                                          # else a beam that waits for the other beams
                self._advance(step, request, sequence, num_tokens)
                left -= num_tokens
        return budget - left

    def _encode(
        self, step: PlanBuilder, request: Request, sequence: Sequence, num_tokens: int, budget: int
    ) -> tuple[int, int]:
        """Plan the encodings of images for a sequence's next tokens; return as `ImageEncodings.fit`."""
        assert self.images is not None, "images of a model that reads text alone"
        return self.images.fit(step, request.images, sequence.num_computed_tokens, num_tokens, budget)

    def _advance(self, step: PlanBuilder, request: Request, sequence: Sequence, num_tokens: int) -> None:
        """Plan the next tokens of a sequence.

        Raises SelfPreemptedError if its own request had to be preempted for blocks.
        """
        step.advance(sequence, num_tokens, self._append(step, request, sequence, num_tokens))
        is_last = sequence.num_computed_tokens + num_tokens == sequence.num_tokens
        if is_last and not isinstance(request.task, Pool):
            step.sample(request, sequence)

    def _append(
        self, step: PlanBuilder, request: Request, sequence: Sequence, num_tokens: int
    ) -> TableUpdate | None:
        """Give slots to a sequence's next tokens; while there are no blocks for them, preempt the last in order."""
        while True:
            try:
                return self._cache.append(sequence.seq_id, num_tokens)
            except OutOfBlocksError:
                if self._give_back_ticket() or self._give_back():
                    continue
                assert len(step.order) > 1, "the first in order is never preempted"
                victim = step.order.pop()
                self.preempt(step, victim)
                if victim is request:
                    raise SelfPreemptedError from None

    def preempt(self, step: PlanBuilder, request: Request) -> None:
        """Preempt a running request by swap or recompute.

        Branches that were planned in this step are retracted first.
        """
        held = [sequence for sequence in request.live if sequence.row != NO_ROW]
        for sequence in held:
            self._cache.retract(sequence.seq_id, sequence.num_computed_tokens)
        step.preempted.append(request.request_id)
        seq_ids, states = [sequence.seq_id for sequence in held], self._cache.states
        has_slots = states is None or states.can_swap_out(seq_ids)
        num_free_blocks = self._cache.swap_space.num_free_blocks if has_slots else 0
        if self._preemption.choose(request, self._cache.swap.footprint(seq_ids), num_free_blocks) == "swap":
            step.plan.state_outs.extend(self._cache.swap_states_out(seq_ids))
            step.plan.swap_outs.extend(self._queues.swap_out(request))
            step.swapped_out.append(request)
        else:
            self._queues.release_for_recompute(request)

    # --- admission ---------------------------------------------------------------------------------------------

    def admit(self, step: PlanBuilder, budget: int) -> WaitReason | None:
        """Admit swapped and waiting requests in order while rows, blocks and budget last; return what is short."""
        reader = LineReader(self._queues.lines)
        try:
            return self._admit_in_order(step, budget, reader)
        finally:
            reader.close()

    def _admit_in_order(self, step: PlanBuilder, budget: int, reader: LineReader) -> WaitReason | None:
        queues, admission = self._queues, self._admission
        while (request := queues.next_to_admit(reader)) is not None:
            step.at = request
            if budget <= 0 or admission.work.is_exhausted:
                return None if step.plan.is_empty else "token_budget"   # else only looks were taken: see `set_aside`
            is_swapped = request in queues.swapped
            if not is_swapped and self._exceeds_share(request, reader):
                self._set_aside(request, Lack("kv_share", is_for_all=True), reader)
                continue
            if (shortage := admission.shortage(request)) is not None:
                if shortage == "kv_blocks" and self._give_back_ticket():
                    continue
                return "swapped_first" if is_swapped else shortage
            if is_swapped:
                num_spare = admission.num_spare_blocks_on_swap_in(request)
                if (shortage := self._block_shortage(num_spare, "swapped_first")) is not None:
                    return shortage
                budget -= self._swap_in(step, request, budget)
                continue
            if (lack := self._lack(request)) is not None:
                self._set_aside(request, lack, reader)
                continue
            match = admission.match(request)
            if match.is_pending:
                reader.pass_over(request)
                admission.skip(request)
                queues.wait_reasons.count_skipped(request, "pending_prefix")
                continue
            num_spare = admission.num_spare_blocks(request, match)
            if num_spare < 0 and self._give_back_ticket():
                continue
            if (shortage := self._block_shortage(num_spare, "kv_blocks")) is not None:
                return shortage
            if self._begin_load(request, match):
                self._set_aside(request, KV_LOAD, reader)
                continue
            num_missing = num_missing_tokens(request) - match.num_tokens
            share = self._prefill_budget.share(step, request, num_missing, budget, match.num_tokens)
            if share == 0:
                if request.num_preemptions or not self._prefill_budget.may_be_passed():
                    return "token_budget"                               # later requests must not take a victim's blocks
                reader.pass_over(request)
                queues.wait_reasons.count_skipped(request, "token_budget")
                continue
            budget -= self._admit_waiting(step, request, match if num_spare > 0 else match.of_whole_blocks(), share)
        return None

    def _lack(self, request: Request) -> Lack | None:
        """Return what a waiting request lacks that is made or loaded for it beside the steps; None: nothing."""
        loads = self._cache.loads
        if loads is not None and loads.is_loading(request.request_id):
            return KV_LOAD
        return self._unprepared(request)

    def _give_back(self) -> bool:
        """Release the blocks that are held for loads; return whether there were any."""
        return self._cache.loads is not None and self._cache.loads.give_back()

    def _give_back_ticket(self) -> bool:
        """Release the blocks that have been kept for another engine the longest; return whether there were any."""
        loads = self._cache.loads
        return loads is not None and loads.tickets is not None and loads.tickets.give_back()

    def _block_shortage(self, num_spare: int, reason: WaitReason) -> WaitReason | None:
        """Return why a request waits for blocks; None: there are enough, or it is alone, and fits (AdmissionLimits).

        Alone, it waits for loads of requests before it; blocks of loads that have ended are given back to it.
        """
        if num_spare >= 0:
            return None
        if self._queues.running:
            return reason
        return "kv_load" if self._cache.loads is not None and self._cache.loads.num_loads else None

    def _begin_load(self, request: Request, match: PrefixMatch) -> bool:
        """Return whether a waiting request that fits has blocks loaded first."""
        loads = self._cache.loads
        if loads is None or not request.reads_cache:
            return False
        sequence, tokens_per_s = request.live[0], self._preemption.rates.prefill_tokens_per_s
        transfer = None if request.is_kept else request.transfer
        wanted = Wanted(
            request.request_id, request.scope, sequence.token_ids, sequence.num_tokens, tokens_per_s, transfer
        )
        return loads.begin(wanted, match)

    def _exceeds_share(self, request: Request, reader: LineReader) -> bool:
        """Return whether a waiting request, or one before it, would take its client past its share."""
        if self._shares is None:
            return False
        return reader.has_ended("kv_share", request.client_id) or self._shares.exceeds(request)

    def _set_aside(self, request: Request, lack: Lack, reader: LineReader) -> None:
        """Pass over a request that lacks something; later steps look at the first of those that do."""
        self._admission.work.count_look()
        self._queues.set_aside(reader, request, lack)

    def _swap_in(self, step: PlanBuilder, request: Request, budget: int) -> int:
        """Swap a request in, and plan its next tokens. Return how many."""
        self._give_back()
        step.plan.swap_ins.extend(self._queues.swap_in(request))
        if self._cache.states is not None:
            started = [sequence.seq_id for sequence in request.live if sequence.row != NO_ROW]
            step.plan.state_ins.extend(self._cache.states.swap_in(started))
        self._record_admitted(step, request)
        for sequence in request.live:
            if sequence.row != NO_ROW:
                self._start_row(step, request, sequence)
        share = self._share(step, request, budget)
        used = self._advance_group(step, request, share) if share > 0 else 0
        self._admission.reserve(request)
        return used

    def _admit_waiting(self, step: PlanBuilder, request: Request, match: PrefixMatch, budget: int) -> int:
        """Admit a waiting request with its cached prefix, and plan its first tokens. Return how many.

        The branches of a preempted sequence group start at once if their prompt has been found.
        """
        self._queues.admit(request)
        self._record_admitted(step, request)
        first, *rest = request.live
        self._start(step, request, first, match)
        num_loaded_tokens = 0
        if self._cache.loads is not None:
            num_loaded_tokens = self._cache.loads.admit(request.request_id, request.scope, first.token_ids, match)
        if request.num_preemptions == 0:
            if request.transfer is None or request.is_kept:
                request.num_disk_tokens = num_loaded_tokens
            else:
                request.num_peer_tokens = num_loaded_tokens
            request.num_cached_tokens = first.num_computed_tokens
            request.num_stateless_tokens = match.num_stateless * self._cache.block_size
            if request.reads_cache:
                self._cache.prefixes.count_query(first.num_prompt_tokens, first.num_computed_tokens)
            self._order.charge_prompt(request)
        if first.num_output_tokens > 0 and self._admission.has_prompt(request, match):
            for other in rest:
                self._start(step, request, other, self._admission.match_sequence(request, other).of_whole_blocks())
        for other in rest:                                              # forks to come have lost all but the prompt
            request.num_recomputed_tokens += self._preemption.record_resumed(other, other.num_prompt_tokens)
        used = self._advance_group(step, request, budget)
        self._admission.reserve(request)
        return used

    def _record_admitted(self, step: PlanBuilder, request: Request) -> None:
        step.admitted.append(request)
        step.order.append(request)
        if self._shares is not None:
            self._shares.admit(request)

    # --- drafts -----------------------------------------------------------------------------------------------------

    def plan_drafts(self, step: PlanBuilder, budget: int) -> None:
        """Plan the drafts of sampled sequences, in their order, from the budget and free blocks that remain.

        `budget`: tokens, 0 or more. Drafts of a sampled sequence that are not planned are dropped: the step samples the
        token that they would have predicted.
        """
        planned = dict[int, PlannedDrafts]()
        for _, sequence in step.sampled:
            if not sequence.drafts:
                continue
            drafts = list(sequence.drafts[:budget])
            self._queues.set_drafts(sequence, ())
            if not drafts:
                continue
            try:
                update = self._cache.append(sequence.seq_id, len(drafts), can_be_awaited=False, keeps_window=True)
            except OutOfBlocksError:
                continue
            planned[sequence.row] = PlannedDrafts(sequence.num_tokens, drafts, update)
            budget -= len(drafts)
        if planned:
            step.verify_drafts(planned)

    # --- sequences begin ------------------------------------------------------------------------------------------

    def _start(self, step: PlanBuilder, request: Request, sequence: Sequence, match: PrefixMatch) -> None:
        """Give a sequence a row, and the tokens of a match."""
        self._queues.assign_row(sequence)
        keeps_all = isinstance(request.task, PinTask) or (request.transfer is not None and request.is_kept)
        copy = self._cache.create(
            sequence.seq_id, sequence.token_ids, request.scope, match, keeps_all=keeps_all,
            num_reserved=self._admission.num_reserved(request),
        )  # fmt: skip
        self._queues.set_computed(sequence, self._cache.num_tokens(sequence.seq_id))
        request.num_recomputed_tokens += self._preemption.record_resumed(sequence, sequence.num_computed_tokens)
        self._start_row(step, request, sequence, copy)

    def _start_row(
        self, step: PlanBuilder, request: Request, sequence: Sequence, copy: BlockCopy | None = None
    ) -> None:
        block_ids = self._cache.block_array(sequence.seq_id)
        step.begin_row(request, sequence, block_ids, copy)
        self._admission.record_started(sequence, len(block_ids))

    def _fork(self, step: PlanBuilder, request: Request, first: Sequence, other: Sequence) -> None:
        """Fork `other` from `first`: share all blocks; sample its first token from the same logits if it has none."""
        self._queues.assign_row(other)
        self._cache.fork(first.seq_id, other.seq_id, other.token_ids)
        self._start_row(step, request, other)
        step.forked.append(other)
        if other.num_output_tokens == 0 and not isinstance(request.task, BeamTask):
            step.sample(request, other)


def num_missing_tokens(request: Request) -> int:
    """Return how many tokens are left to compute before the branches of a request diverge."""
    first = request.live[0]
    target = first.num_tokens if len(request.live) == 1 else first.num_prompt_tokens
    return target - first.num_computed_tokens


def _decodes(running: list[Request], index: int, budget: int) -> list[Sequence]:
    """Return the sequences of the running requests from `index` on that compute one token each: most, in most steps.

    Ends before a request that has more to compute, or is a group, or pools, or is at the end of a prompt with images.
    """
    sequences = []
    for request in running[index : index + min(budget, _DECODES_AT_ONCE)]:
        live = request.live
        first = live[0]
        output = first.token_ids.output
        if first.num_prompt_tokens + len(output) - first.num_computed_tokens != 1 or len(live) > 1:
            break
        if first.row == NO_ROW or (not output and (request.images or isinstance(request.task, Pool))):
            break
        sequences.append(first)
    return sequences
