"""Admission control: whether a waiting or swapped request fits into this step, and its prefix in the cache.

A request fits if there are rows for its sequences and blocks for all known tokens, with HEAD_ROOM tokens more for each
running sequence, so that an admitted request is not preempted at once (docs/decisions/0013). A sequence group that has
only started its prompt takes more blocks later than it holds: these are reserved.

The work of one step is bounded, so that a burst of requests does not delay running sequences: looking up and sharing
the 8,000 blocks of a prompt of 128,000 tokens takes half a millisecond or more, starting a sequence 70 microseconds.
When a step has done MAX_WORK, later steps admit the rest in the same order; the first admission of a step always runs.
Lookups are not repeated: a pending match is followed from step to step instead of walking the prefix tree from the
root, and a burst with a common prefix is matched against the blocks of the request admitted before it.
"""

from quire.cache.manager import KVCacheManager
from quire.cache.prefix_tree import NO_MATCH, Awaited, PrefixMatch
from quire.cache.states import most_slots
from quire.core.config import SchedulerConfig
from quire.core.deltas import WaitReason
from quire.core.sequence import Request, Sequence, SequenceStatus
from quire.scheduling.queues import RequestQueues

HEAD_ROOM = 16  # tokens, but one block at most
MAX_WORK = 16_384   # per step, in units of half a microsecond (AMD EPYC, 2024): 8 ms
_LOOK_WORK = 16     # work of a look at a waiting request, which may then be queued with those that lack the same
_LOOKUP_WORK = 16   # a lookup, plus a unit for each node of the prefix tree
_ROW_WORK = 128     # the start of a sequence
_BLOCKS_PER_UNIT = 8  # blocks compared, shared and copied, where they are found in a table


class AdmissionWork:
    """The admission work of the step that is being planned."""

    def __init__(self) -> None:
        self.num_done = 0

    @property
    def is_exhausted(self) -> bool:
        """Return whether the step may admit no more."""
        return self.num_done >= MAX_WORK

    def count_look(self) -> None:
        """Count a look at a request that lacks something."""
        self.num_done += _LOOK_WORK

    def count_lookup(self, match: PrefixMatch) -> None:
        """Count a lookup: nodes that it visited, with a state or without, and blocks that it found in a table."""
        num_nodes = len(match.blocks) + match.num_stateless - match.num_known
        self.num_done += _LOOKUP_WORK + num_nodes + match.num_known // _BLOCKS_PER_UNIT

    def count_refreshed(self) -> None:
        """Count a pending match that was refreshed from the last step."""
        self.num_done += _LOOKUP_WORK

    def count_row(self, num_blocks: int) -> None:
        """Count a sequence that starts in a row with `num_blocks` blocks."""
        self.num_done += _ROW_WORK + num_blocks // _BLOCKS_PER_UNIT


class PrefixLookups:
    """Prefix lookups of waiting requests: pending matches by request id, and the sequence that started last."""

    def __init__(self, cache: KVCacheManager, work: AdmissionWork) -> None:
        self._cache, self._work = cache, work
        self._awaited: dict[int, Awaited] = {}
        self._awaited_before: dict[int, Awaited] = {}
        self._last_started: int | None = None   # a sequence id
        self.has_awaited = False                # whether a match of the last two steps is pending

    def start_step(self) -> None:
        """Start a step: requests without a lookup in the last step have finished or been admitted."""
        self._awaited_before, self._awaited = self._awaited, {}
        self.has_awaited = bool(self._awaited_before)

    def record_started(self, sequence: Sequence) -> None:
        """Record a sequence that has a block table now: the next request may start with the same tokens."""
        self._last_started = sequence.seq_id

    def match_first(self, request: Request, stop: int) -> PrefixMatch:
        """Look up the first `stop` tokens of a waiting request's first branch."""
        request_id, sequence = request.request_id, request.live[0]
        awaited = self._awaited.get(request_id) or self._awaited_before.get(request_id)
        if awaited is not None:
            awaited = self._cache.prefixes.still_awaits(awaited, sequence.token_ids)
        if awaited is not None:
            self._work.count_refreshed()
            match = PrefixMatch(awaited=awaited)
        else:
            match = self.match(request, sequence, stop)
            if match.awaited is not None and self._cache.states is not None:
                self._cache.states.want(match.awaited.path, sequence.token_ids, stop)
        if match.awaited is not None:
            self._awaited[request_id] = match.awaited
            self.has_awaited = True
        return match

    def match(self, request: Request, sequence: Sequence, stop: int) -> PrefixMatch:
        """Look up the first `stop` tokens of any branch."""
        match = self._cache.match(sequence.token_ids, stop, request.scope, self._last_started)
        self._work.count_lookup(match)
        if match.num_stateless and self._cache.states is not None:
            return match._replace(awaits_state=self._cache.states.is_expected(match, request.scope, sequence.token_ids))
        return match


class AdmissionControl:
    """The rows and blocks that are reserved in this step. Reads the queues and the cache, and changes neither."""

    def __init__(self, queues: RequestQueues, cache: KVCacheManager, config: SchedulerConfig) -> None:
        self._queues, self._cache, self._config = queues, cache, config
        self._num_reserved_blocks = self._num_reserved_seqs = 0
        self.work = AdmissionWork()
        self._lookups = PrefixLookups(cache, self.work)

    # --- room -----------------------------------------------------------------------------------------------------

    def check_admissible(self, request: Request) -> None:
        """Raise InvalidRequestError if a request could never run for a reason that AdmissionLimits does not check."""

    def num_reserved(self, request: Request) -> int:
        """Return how many tokens each sequence of a request reserves: none, blocks are allocated as they fill."""
        return 0

    def start_step(self) -> None:
        """Start a step: nothing is reserved yet."""
        self._num_reserved_blocks = self._num_reserved_seqs = 0
        self.work.num_done = 0
        if self._lookups.has_awaited:
            self._lookups.start_step()

    def record_started(self, sequence: Sequence, num_blocks: int) -> None:
        """Record a sequence that starts in a row with `num_blocks` blocks."""
        self.work.count_row(num_blocks)
        self._lookups.record_started(sequence)

    def reserve(self, request: Request) -> None:
        """Reserve blocks for the known tokens of a sequence group that this step does not compute."""
        self._num_reserved_blocks += self._blocks_to_come(request)

    def skip(self, request: Request) -> None:
        """Reserve the rows of a request that waits for this step, so that later requests cannot take them."""
        self._num_reserved_seqs += len(request.live)

    def may_admit(self) -> bool:
        """Return whether the next waiting request may fit (cheap check, ignores the prefix cache)."""
        request = self._queues.first_to_admit()
        return request is not None and self.shortage(request) is None

    def has_room_for_next(self) -> bool:
        """Return whether the next waiting request fits (exact check with the prefix cache, ignores reservations).

        True also while its prefix is being computed.
        """
        request = self._queues.first_to_admit()
        if request is None or self.shortage(request) is not None:
            return False
        if request in self._queues.swapped:
            return self.num_spare_blocks_on_swap_in(request) + self._num_reserved_blocks >= 0
        match = self.match(request)
        return match.is_pending or self.num_spare_blocks(request, match) + self._num_reserved_blocks >= 0

    def shortage(self, request: Request) -> WaitReason | None:
        """Return what is short by a cheap check: rows for the request, or head room for running sequences."""
        num_running_seqs = self._queues.num_running_seqs + self._num_reserved_seqs + len(request.live)
        if num_running_seqs > self._config.max_num_seqs:
            return "max_num_seqs"
        states = self._cache.states
        if states is not None and most_slots(num_running_seqs) > states.num_slots:
            return "state_slots"
        num_spare = self._cache.num_free_blocks - self._num_reserved_blocks - self.head_room(num_running_seqs)
        return None if self._queues.num_running_seqs == 0 or num_spare >= 0 else "kv_blocks"

    def num_spare_blocks(self, request: Request, match: PrefixMatch) -> int:
        """Return how many blocks stay free once a waiting request has all that it needs; below 0 it does not fit.

        A request preempted in this step does not fit: another sequence took one of its blocks.
        """
        num_running_seqs = self._queues.num_running_seqs + len(request.live)
        num_needed = self.known_blocks(request) - match.num_in_use + self.head_room(num_running_seqs)
        return self._cache.num_free_blocks - self._num_reserved_blocks - num_needed

    def num_spare_blocks_on_swap_in(self, request: Request) -> int:
        """Return how many blocks stay free once a swapped request has its blocks and those of its known tokens."""
        swapped = [sequence.seq_id for sequence in request.live if sequence.status is SequenceStatus.SWAPPED]
        num_running_seqs = self._queues.num_running_seqs + len(request.live)
        num_needed = self._cache.swap.num_blocks_to_swap_in(swapped) + self._blocks_to_come(request)
        return self._cache.num_free_blocks - self._num_reserved_blocks - num_needed - self.head_room(num_running_seqs)

    def head_room(self, num_running_seqs: int) -> int:
        """Return how many blocks running sequences are likely to take soon: with large blocks, under one each."""
        return self._cache.blocks_for(num_running_seqs * min(HEAD_ROOM, self._cache.block_size))

    def known_blocks(self, request: Request) -> int:
        """Return the blocks that the known tokens of a waiting request take, the prompt shared by all branches."""
        cache, live = self._cache, request.live
        shared = live[0].num_prompt_tokens // cache.block_size
        return shared + sum(cache.blocks_for(sequence.num_tokens) - shared for sequence in live)

    def _blocks_to_come(self, request: Request) -> int:
        """Return the most blocks that the known tokens of a sequence group may take beyond those that it holds.

        The last block of a running sequence may have to be copied; a swapped one counts with one more for that.
        """
        cache, blocks = self._cache, 0
        for sequence in request.live:
            if sequence.status is SequenceStatus.RUNNING:
                held = cache.num_tokens(sequence.seq_id) // cache.block_size
            elif sequence.status is SequenceStatus.SWAPPED:
                held = cache.blocks_for(sequence.num_computed_tokens)
            else:
                held = sequence.num_prompt_tokens // cache.block_size   # shared by the fork
            blocks += cache.blocks_for(sequence.num_tokens) - held
        return blocks

    # --- cached prefixes -----------------------------------------------------------------------------------------

    def match(self, request: Request) -> PrefixMatch:
        """Match the first branch of a waiting request: at most its prompt, if other branches fork from it.

        A request that needs something of each token, prompt logprobs or a mean, computes its whole prompt.
        """
        if not request.reads_cache:
            return NO_MATCH
        first = request.live[0]
        match = self._lookups.match_first(request, first.num_tokens)
        if len(request.live) == 1 or first.num_output_tokens == 0 or self.has_prompt(request, match):
            return match
        return self._lookups.match_first(request, first.num_prompt_tokens)

    def match_sequence(self, request: Request, sequence: Sequence) -> PrefixMatch:
        """Match one branch."""
        return self._lookups.match(request, sequence, sequence.num_tokens)

    def has_prompt(self, request: Request, match: PrefixMatch) -> bool:
        """Return whether a match has all full blocks of the prompt: then no branch waits for another.

        With states each branch must have them: from an earlier snapshot it would compute blocks of the prompt for
        itself, which `known_blocks` counts once.
        """
        num_full, rest = request.live[0].num_prompt_tokens // self._cache.block_size, request.live[1:]
        if not match.blocks or len(match.blocks) < num_full:
            return False
        if self._cache.states is None:
            return True
        return all(len(self.match_sequence(request, other).blocks) >= num_full for other in rest)
