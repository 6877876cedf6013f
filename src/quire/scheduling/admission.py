"""Whether a request that waits, or is swapped out, may run now: rows and blocks for it, and what it finds in the cache.

Room means blocks for all known tokens, and for HEAD_ROOM more of each running sequence, so that an admitted request is
not preempted at once (docs/decisions/0013). A sequence group that has only begun its prompt takes more blocks later
than it holds: these are reserved.
"""

from quire.cache.manager import KVCacheManager
from quire.cache.prefix_cache import NO_MATCH, PrefixMatch
from quire.core.outputs import WaitReason
from quire.core.sequence import Request, Sequence, SequenceStatus
from quire.scheduling.admission_work import AdmissionWork
from quire.scheduling.prefix_lookups import PrefixLookups
from quire.scheduling.queues import RequestQueues

HEAD_ROOM = 16  # tokens, but one block at most


class AdmissionControl:
    """Counts the seats and blocks that are promised in this step; asks queues and cache, and changes nothing."""

    def __init__(self, queues: RequestQueues, cache: KVCacheManager, max_num_seqs: int) -> None:
        self._queues, self._cache, self._max_num_seqs = queues, cache, max_num_seqs
        self._num_reserved_blocks = 0  # blocks
        self._num_skipped_seqs = 0      # seats
        self.work = AdmissionWork()
        self._lookups = PrefixLookups(cache, self.work)

    # --- room -----------------------------------------------------------------------------------------------------

    def check_admissible(self, request: Request) -> None:
        """Raise an InvalidRequestError if a request could never run for a reason that the limits do not know."""

    def num_reserved(self, request: Request) -> int:
        """Return how many tokens each sequence of a request reserves: none, since blocks are taken as they fill."""
        return 0

    def start_step(self) -> None:
        """Begin a step: nothing is promised yet."""
        self._num_reserved_blocks = self._num_skipped_seqs = 0
        self.work.start_step()
        self._lookups.start_step()

    def record_started(self, sequence: Sequence, num_blocks: int) -> None:
        """Note a sequence that begins in a row, with so many blocks."""
        self.work.count_row(num_blocks)
        self._lookups.record_started(sequence)

    def reserve(self, request: Request) -> None:
        """Keep blocks back for what is known of a sequence group's branches that this step does not reach."""
        self._num_reserved_blocks += self._blocks_to_come(request)

    def skip(self, request: Request) -> None:
        """Keep the seats of a request that waits for this step: nobody behind it takes them, or looks in vain."""
        self._num_skipped_seqs += len(request.live)

    def may_admit(self) -> bool:
        """Whether there is somebody to be let in next, and may be room for him."""
        request = self._queues.next_to_admit()
        return request is not None and self.shortage(request) is None

    def has_room_for_next(self) -> bool:
        """Whether who is to be let in next has room by a close look, promises apart: they may have been kept by now.

        Also while the prefix that he begins with is being computed.
        """
        request = self._queues.next_to_admit()
        if request is None or self.shortage(request) is not None:
            return False
        if request in self._queues.swapped:
            return self.num_spare_blocks_on_swap_in(request) + self._num_reserved_blocks >= 0
        match = self.match(request)
        return match.is_pending or self.num_spare_blocks(request, match) + self._num_reserved_blocks >= 0

    def shortage(self, request: Request) -> WaitReason | None:
        """Return what there is too little of at a quick look: rows for its branches, or blocks for those that run."""
        num_running_seqs = self._queues.num_running_seqs + self._num_skipped_seqs + len(request.live)
        if num_running_seqs > self._max_num_seqs:
            return "max_num_seqs"
        num_spare = self._cache.num_free_blocks - self._num_reserved_blocks - self.head_room(num_running_seqs)
        return None if self._queues.num_running_seqs == 0 or num_spare >= 0 else "kv_blocks"

    def num_spare_blocks(self, request: Request, match: PrefixMatch) -> int:
        """Return how many blocks stay free when a waiting request has all that it needs; below 0 it has no room.

        A request that was preempted in this very step has no room: somebody else took one of its blocks.
        """
        num_running_seqs = self._queues.num_running_seqs + len(request.live)
        num_needed = self.known_blocks(request) - match.num_in_use + self.head_room(num_running_seqs)
        return self._cache.num_free_blocks - self._num_reserved_blocks - num_needed

    def num_spare_blocks_on_swap_in(self, request: Request) -> int:
        """Return how many blocks stay free when a swapped request has all that it had, and its known tokens' blocks."""
        swapped = [sequence.seq_id for sequence in request.live if sequence.status is SequenceStatus.SWAPPED]
        num_running_seqs = self._queues.num_running_seqs + len(request.live)
        num_needed = self._cache.num_blocks_to_swap_in(swapped) + self._blocks_to_come(request)
        return self._cache.num_free_blocks - self._num_reserved_blocks - num_needed - self.head_room(num_running_seqs)

    def head_room(self, num_running_seqs: int) -> int:
        """Return how many blocks so many sequences are likely to take soon: with large blocks, fewer than one each."""
        return self._cache.blocks_for(num_running_seqs * min(HEAD_ROOM, self._cache.block_size))

    def known_blocks(self, request: Request) -> int:
        """Return the blocks that all known tokens of a waiting request will take, its prompt shared by all branches."""
        cache, live = self._cache, request.live
        shared = live[0].num_prompt_tokens // cache.block_size
        return shared + sum(cache.blocks_for(sequence.num_tokens) - shared for sequence in live)

    def _blocks_to_come(self, request: Request) -> int:
        """Return the most blocks that a sequence group may take for what is known of its branches, past what it holds.

        Of a running one the last block may have to be copied. A swapped one is given a block for that besides.
        """
        cache, blocks = self._cache, 0
        for sequence in request.live:
            if sequence.status is SequenceStatus.RUNNING:
                held = cache.num_tokens(sequence.seq_id) // cache.block_size
            elif sequence.status is SequenceStatus.SWAPPED:
                held = cache.blocks_for(sequence.num_computed_tokens)
            else:
                held = sequence.num_prompt_tokens // cache.block_size   # it will share those
            blocks += cache.blocks_for(sequence.num_tokens) - held
        return blocks

    # --- what is there already ------------------------------------------------------------------------------------

    def match(self, request: Request) -> PrefixMatch:
        """Look up what the first branch of a waiting request begins with: at most the prompt, if others fork from it.

        Whoever wants prompt logprobs computes the whole prompt.
        """
        if request.params.prompt_logprobs is not None:
            return NO_MATCH
        first = request.live[0]
        match = self._lookups.match_first(request, first.num_tokens)
        if len(request.live) == 1 or first.num_output_tokens == 0 or self.has_prompt(request, match):
            return match
        return self._lookups.match_first(request, first.num_prompt_tokens)

    def match_sequence(self, request: Request, sequence: Sequence) -> PrefixMatch:
        """Look up what one branch begins with."""
        return self._lookups.match(request, sequence, sequence.num_tokens)

    def has_prompt(self, request: Request, match: PrefixMatch) -> bool:
        """Whether a match has the whole prompt, but for a block that is not full: no branch has to wait for another."""
        num_full = request.live[0].num_prompt_tokens // self._cache.block_size
        return len(match.blocks) > 0 and len(match.blocks) >= num_full
