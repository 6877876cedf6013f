"""Who computes how much in a step. Every running request is planned before any waiting one is let in.

When blocks run out, the last in order gives way as a whole, to be computed again later or swapped out and in (Kwon et
al. 2023, section 4.5). The first in order never does. Whoever waits comes in while rows, blocks and budget last; who
begins with a block that is being computed in this step is passed over, and its seats are kept: in the next step it
finds that block.
"""

from collections.abc import Iterator

from quire.cache.block_pool import OutOfBlocksError
from quire.cache.block_table import TableUpdate
from quire.cache.manager import KVCacheManager
from quire.cache.prefix_cache import NO_MATCH, PrefixMatch
from quire.core.outputs import WaitReason
from quire.core.plan import BlockCopy
from quire.core.sequence import NO_ROW, Request, Sequence
from quire.scheduling.budget import LongPrompts
from quire.scheduling.entrance import Entrance
from quire.scheduling.kv_shares import KVShares
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.policies import ByPriority, PassedOver
from quire.scheduling.recovery import RecoveryPolicy
from quire.scheduling.roster import Roster

_DECODES_AT_ONCE = 256  # where decodes and gangs alternate, each run of decodes looks at no more requests than this


class GaveWayError(Exception):
    """The request that was being planned is the last in order itself, and has been preempted."""


class Planner:
    """Writes the plan of one step after the other. Changes where requests stand, and what they hold."""

    def __init__(
        self, budget: int, roster: Roster, entrance: Entrance, recovery: RecoveryPolicy, order: ByPriority,
        cache: KVCacheManager, shares: KVShares,
    ) -> None:  # fmt: skip
        self._shares = shares
        self._roster, self._entrance, self._recovery = roster, entrance, recovery
        self._order, self._cache = order, cache
        self._long_prompts = LongPrompts(budget, self._contenders)
        self._line: list[Request] = []  # running requests as this step plans them; the last is preempted first
        self.step = PlanBuilder()       # that is being planned, or is under way

    def open(self, step: PlanBuilder) -> None:
        """Begin to plan a step."""
        self.step = step
        self._entrance.open()
        self._shares.open()
        self._roster.hold_ups.open()
        self._long_prompts.open()
        if self._cache.can_find and self._needs_prefixes():
            self._cache.publish()

    def _needs_prefixes(self) -> bool:
        """Whether somebody may be let in and will look for prefixes, or blocks are short: none may be there twice."""
        return self._entrance.may_admit() or self._cache.num_free_blocks < self._roster.num_seats

    def _contenders(self) -> Iterator[Request]:
        """Yield who could use some of this step's budget: who runs, and who may be let in next."""
        yield from self._roster.running
        if self._entrance.may_admit():
            yield from self._roster.swapped or self._roster.waiting

    def preempt_excess(self) -> None:
        """Preempt the requests that take their clients past their shares. They come back by recomputation.

        Swapped-out requests return whatever their clients hold, so these would be moved to and fro.
        """
        for request in self._shares.excess():
            request.num_preemptions += 1
            request.num_recomputed_tokens = request.num_swapped_blocks = 0
            self.step.preempted.append(request.request_id)
            self._recovery.count("recompute")
            self._roster.lose(request)

    # --- who runs -------------------------------------------------------------------------------------------------

    def plan_running(self, budget: int) -> int:
        """Plan running requests in order. Return the budget left."""
        running, index = self._order.in_line(self._roster.running), 0
        self._line = running
        try:
            while budget > 0 and index < len(running):
                self.step.at = running[index]
                if decodes := self._decodes(index, budget):
                    num_planned = self._plan_decodes(index, decodes)
                    budget -= num_planned
                    index += num_planned
                else:
                    budget -= self._advance_share(running[index], budget)
                    index += 1
        except GaveWayError:
            pass                                                        # it was the last
        return budget

    def _decodes(self, index: int, budget: int) -> list[Sequence]:
        """Return the sequences of the running requests from `index` on that have one token to compute, up to one that
        has more, or is a gang: what most requests of most steps are."""
        sequences = []
        for request in self._line[index : index + min(budget, _DECODES_AT_ONCE)]:
            live = request.live
            first = live[0]
            num_missing = first.num_prompt_tokens + len(first.token_ids.output) - first.num_computed_tokens
            if num_missing != 1 or len(live) > 1 or first.row == NO_ROW:
                break
            sequences.append(first)
        return sequences

    def _plan_decodes(self, index: int, sequences: list[Sequence]) -> int:
        """Plan one token of each of these, all at once. Return of how many: the last ones may have to give way."""
        running, step, updates = self._line, self.step, dict[int, TableUpdate | None]()
        try:
            for place in self._cache.append_where_room([sequence.seq_id for sequence in sequences]):
                if index + place >= len(running):
                    break                                               # has given way meanwhile
                step.at = running[index + place]
                updates[place] = self._append(step.at, sequences[place], 1)
        except GaveWayError:
            pass                                                        # it was the last
        finally:
            del sequences[len(running) - index :]
            step.decode(running[index : index + len(sequences)], sequences, updates)
        return len(sequences)

    def _advance_share(self, request: Request, budget: int) -> int:
        """Plan a prompt, which may be long, or a gang. What a prompt does not get in this step is promised to it."""
        mark, num_missing = self.step.mark(), num_missing_tokens(request)
        waits_to_fork, is_alone = request.live[-1].row == NO_ROW, len(request.live) == 1
        if waits_to_fork or is_alone:
            budget = self._long_prompts.share(num_missing, budget)
        try:
            used = self._advance_gang(request, budget) if budget > 0 else 0
        except GaveWayError:
            self.step.cut(mark)
            raise
        if waits_to_fork or (is_alone and used < num_missing):
            self._entrance.promise(request)
        return used

    def _advance_gang(self, request: Request, budget: int) -> int:
        """Plan the branches of a request, up to `budget` tokens in all. Return how many.

        First one branch computes the prompt for all, and the others fork from it at its end (section 4.4). A fork
        shares the blocks that this step fills; the first write to a shared one comes in a later step, so its copy finds
        them filled. Then each goes its own way.
        """
        first, *others = request.live
        if request.live[-1].row == NO_ROW:
            if first.row == NO_ROW:
                self._begin(request, first, NO_MATCH)                   # its gang's first has ended before the fork
            num_missing = num_missing_tokens(request)
            used = min(num_missing, budget)
            self._advance(request, first, used)
            if used == num_missing:
                for other in others:
                    self._fork(request, first, other)
            return used
        left = budget
        for sequence in request.live:
            num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, left)
            if num_tokens > 0:                                          # else a beam that waits for the others
                self._advance(request, sequence, num_tokens)
                left -= num_tokens
        return budget - left

    def _advance(self, request: Request, sequence: Sequence, num_tokens: int) -> None:
        """Plan the next tokens of a sequence. GaveWayError if its own request had to be preempted for blocks."""
        self.step.advance(sequence, num_tokens, self._append(request, sequence, num_tokens))
        if sequence.num_computed_tokens + num_tokens == sequence.num_tokens:
            self.step.sample(request, sequence)

    def _append(self, request: Request, sequence: Sequence, num_tokens: int) -> TableUpdate | None:
        """Give slots to a sequence's next tokens; while there are no blocks for them, preempt the last in order."""
        while True:
            try:
                return self._cache.append(sequence.seq_id, num_tokens)
            except OutOfBlocksError:
                assert len(self._line) > 1, "the first in order is never preempted"
                victim = self._line.pop()
                self.preempt(victim)
                if victim is request:
                    raise GaveWayError from None

    def preempt(self, request: Request) -> None:
        """Take everything from a running request, to come back in one way or the other.

        Some of its branches may have been planned in this very step: that is taken back first.
        """
        held = [sequence for sequence in request.live if sequence.row != NO_ROW]
        for sequence in held:
            self._cache.retract(sequence.seq_id, sequence.num_computed_tokens)
        request.num_preemptions += 1
        request.num_recomputed_tokens = request.num_swapped_blocks = 0
        self.step.preempted.append(request.request_id)
        footprint = self._cache.footprint([sequence.seq_id for sequence in held])
        if self._recovery.choose(request, footprint, self._cache.num_free_swap_blocks) == "swap":
            self.step.plan.swap_outs.extend(self._roster.swap_out(request))
            self.step.swapped_out.append(request)
        else:
            self._roster.lose(request)

    # --- who comes in ---------------------------------------------------------------------------------------------

    def admit(self, budget: int) -> WaitReason | None:
        """Let swapped and waiting requests run, in order, while rows, blocks and budget last. Return what does not."""
        roster, entrance, passed = self._roster, self._entrance, PassedOver()
        while (request := roster.next_to_enter(passed)) is not None:
            self.step.at = request
            if budget <= 0 or entrance.work.is_done:
                return "token_budget"
            is_swapped = request in roster.swapped
            if not is_swapped and self._shares.exceeds(request):
                passed.add_client(request.client_id)
                roster.hold_ups.pass_over(request, "kv_share")
                continue
            if (shortage := entrance.shortage(request)) is not None:
                return "swapped_first" if is_swapped else shortage
            if is_swapped:
                if entrance.num_spare_blocks_on_return(request) < 0 and roster.running:
                    return "swapped_first"
                budget -= self._return(request, budget)
                continue
            match = entrance.match(request)
            if match.is_pending:
                passed.add(request)
                entrance.pass_over(request)
                roster.hold_ups.pass_over(request, "pending_prefix")
                continue
            num_spare = entrance.num_spare_blocks(request, match)
            if num_spare < 0 and roster.running:                        # alone it fits: see AdmissionLimits
                return "kv_blocks"
            share = self._long_prompts.share(num_missing_tokens(request) - match.num_tokens, budget)
            if share == 0:
                if request.num_preemptions or not self._long_prompts.may_be_passed():
                    return "token_budget"                               # nobody takes the blocks of who gave way
                passed.add(request)
                roster.hold_ups.pass_over(request, "token_budget")
                continue
            budget -= self._let_in(request, match if num_spare > 0 else match.of_whole_blocks(), share)
        return None

    def _return(self, request: Request, budget: int) -> int:
        """Swap a request in, and plan its next tokens. Return how many."""
        self.step.admitted.append(request)
        self.step.plan.swap_ins.extend(self._roster.swap_in(request))
        self._note_admitted(request)
        for sequence in request.live:
            if sequence.row != NO_ROW:
                self._begin_row(request, sequence)
        used = self._advance_gang(request, budget)
        self._entrance.promise(request)
        return used

    def _let_in(self, request: Request, match: PrefixMatch, budget: int) -> int:
        """Let a waiting request begin with what has been found, and plan its first tokens. Return how many.

        The branches of a preempted gang go their own ways at once if their prompt has been found.
        """
        self.step.admitted.append(request)
        self._roster.let_in(request)
        self._note_admitted(request)
        first, *others = request.live
        self._begin(request, first, match)
        if request.num_preemptions == 0:
            request.num_cached_tokens = first.num_computed_tokens
            if request.params.prompt_logprobs is None:
                self._cache.note_query(first.num_prompt_tokens, first.num_computed_tokens)
            self._order.charge_prompt(request)
        if first.num_output_tokens > 0 and self._entrance.has_prompt(request, match):
            for other in others:
                self._begin(request, other, self._entrance.match_sequence(request, other).of_whole_blocks())
        for other in others:                                            # that will fork have lost all but the prompt
            request.num_recomputed_tokens += self._recovery.note_return(other, other.num_prompt_tokens)
        used = self._advance_gang(request, budget)
        self._entrance.promise(request)
        return used

    def _note_admitted(self, request: Request) -> None:
        self._line.append(request)
        self._shares.admit(request)

    # --- sequences begin ------------------------------------------------------------------------------------------

    def _begin(self, request: Request, sequence: Sequence, match: PrefixMatch) -> None:
        """Give a sequence a row, and the tokens of a match."""
        self._roster.give_row(sequence)
        copy = self._cache.create(
            sequence.seq_id, sequence.token_ids, request.cache_salt, match,
            keeps_all=request.is_pin, num_reserved=self._entrance.num_reserved(request),
        )  # fmt: skip
        sequence.num_computed_tokens = self._cache.num_tokens(sequence.seq_id)
        request.num_recomputed_tokens += self._recovery.note_return(sequence, sequence.num_computed_tokens)
        self._begin_row(request, sequence, copy)

    def _begin_row(self, request: Request, sequence: Sequence, copy: BlockCopy | None = None) -> None:
        block_ids = self._cache.block_array(sequence.seq_id)
        self.step.begin_row(request, sequence, block_ids, copy)
        self._entrance.note_begun(sequence, len(block_ids))

    def _fork(self, request: Request, first: Sequence, other: Sequence) -> None:
        """Let `other` share all blocks of `first`, and draw its first token from the same logits if it has none."""
        self._roster.give_row(other)
        self._cache.fork(first.seq_id, other.seq_id, other.token_ids)
        self._begin_row(request, other)
        self.step.forked.append(other)
        if other.num_output_tokens == 0 and request.beam is None:
            self.step.sample(request, other)


def num_missing_tokens(request: Request) -> int:
    """Count what is to be computed before the branches of a request go their own ways."""
    first = request.live[0]
    target = first.num_tokens if len(request.live) == 1 else first.num_prompt_tokens
    return target - first.num_computed_tokens
