"""Request queues: waiting, running, swapped and held requests in queue order, and the worker's rows.

A waiting request holds nothing. A running request reserves a row for each sequence and holds rows and blocks for those
that have started; a swapped one holds blocks of the swap space. A preempted request returns to its place in queue
order, in most cases the front. Steps read the waiting ones by their lines (`quire.scheduling.waiting_lines`).
"""

from bisect import bisect_left, insort
from collections.abc import Container, Iterable

from quire.cache.manager import KVCacheManager
from quire.core.deltas import WAIT_REASONS, WaitReason
from quire.core.plan import BlockCopy
from quire.core.sequence import NO_ROW, Request, Sequence, SequenceStatus
from quire.scheduling.waiting_lines import ByPriority, Lack, LineReader, WaitingLines, queue_key_of


class WaitReasonCounters:
    """Steps that left a request waiting, by reason, since start.

    `current`: the reason in the last plan, if any; `num_skipped`: requests that it skipped.
    """

    def __init__(self) -> None:
        self._num_steps = [0] * len(WAIT_REASONS)
        self._num_before = -1  # steps before the last one
        self.current: WaitReason | None = None
        self.num_skipped = 0

    def start_step(self) -> None:
        """Begin a step."""
        self.current, self.num_skipped = None, 0
        self._num_before += 1

    def count(self, reason: WaitReason | None) -> None:
        """Count the reason that held back the head of the queue; None: nothing did."""
        if reason is not None:
            self.current = reason
            self._num_steps[WAIT_REASONS.index(reason)] += 1

    def count_skipped(self, request: Request, reason: WaitReason) -> None:
        """Count that one request was skipped."""
        self.current = reason
        self.num_skipped += 1
        request.waited[WAIT_REASONS.index(reason)] += 1

    def begin_lack(self, request: Request, reason: WaitReason) -> None:
        """Count the step under way, and those to come, for a request that lacks something."""
        request.waited[WAIT_REASONS.index(reason)] -= self._num_before

    def end_lack(self, request: Request, reason: WaitReason | None) -> None:
        """Count no more steps for a request, the one under way included. `reason`: as begun; None: nothing was."""
        if reason is not None:
            request.waited[WAIT_REASONS.index(reason)] += self._num_before

    def start(self, request: Request) -> None:
        """Start counting for a request that is queued."""
        request.waited = [-count for count in self._num_steps]

    def stop(self, request: Request) -> None:
        """Let `request.waited` be the steps since `start`."""
        request.waited = [waited + count for waited, count in zip(request.waited, self._num_steps, strict=True)]


class RequestQueues:
    """All requests of a scheduler, by id and in queue order. The only writer of rows, statuses and computed tokens."""

    def __init__(self, cache: KVCacheManager, max_num_seqs: int, policy: ByPriority) -> None:
        self._cache, self._policy = cache, policy
        self.requests: dict[int, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self.held: list[Request] = []   # waiting or swapped out, and not to be admitted (quire.scheduling.isolation)
        self.lines = WaitingLines(policy.rank, policy.make_line)  # the lines of `waiting`
        self.wait_reasons = WaitReasonCounters()
        self.num_running_seqs = 0              # unfinished sequences of running requests
        self.num_drafted = 0                   # sequences that have drafts: they hold rows
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_deferred(self) -> int:
        """Waiting requests that lack something, or that the last plan skipped: those behind them could be admitted."""
        return self.lines.num_lacking + self.wait_reasons.num_skipped

    def is_running(self, request: Request) -> bool:
        """Return whether a request is among the running ones."""
        return _is_in(self.running, request)

    def first_to_admit(self) -> Request | None:
        """Return the first request in the order of admission, whatever it lacks; None if there is none."""
        return self._before_swapped(self.lines.preempted.first()) if self.swapped else self.lines.first()

    def next_to_admit(self, reader: LineReader) -> Request | None:
        """Return the next request to admit that the step has not passed over; None if there is none.

        While anything is swapped out nothing new is admitted: of the waiting requests only a preempted one before it.
        """
        return self._before_swapped(reader.next_preempted()) if self.swapped else reader.next()

    def _before_swapped(self, victim: Request | None) -> Request:
        first = self.swapped[0]
        return victim if victim is not None and victim.queue_key < first.queue_key else first

    def set_aside(self, reader: LineReader, request: Request, lack: Lack) -> None:
        """Pass over a waiting request for this step, and let later ones know what it lacks."""
        before = self.lines.lack_of(request)
        if reader.set_aside(request, lack):
            self.wait_reasons.end_lack(request, before)
            self.wait_reasons.begin_lack(request, lack.reason)
        elif request.num_preemptions:
            self.wait_reasons.count_skipped(request, lack.reason)
        self.wait_reasons.current = lack.reason

    # --- transitions -------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a new request as waiting."""
        request.queue_key = self._policy.queue_key(request, request.live[0].seq_id)
        self._policy.add(request)
        self.requests[request.request_id] = request
        self._enqueue(request, self.waiting)

    def admit(self, request: Request) -> None:
        """Move a request from its queue to the running ones. It has no rows yet."""
        self._remove(request)
        request.queue_key = self._policy.admit(request)
        self.wait_reasons.stop(request)
        insort(self.running, request, key=queue_key_of)
        self.num_running_seqs += len(request.live)

    def assign_row(self, sequence: Sequence) -> None:
        """Give a sequence of a running request a row."""
        sequence.row = self.free_rows.pop()
        sequence.status = SequenceStatus.RUNNING

    def advance(self, sequences: Iterable[Sequence], counts: Iterable[int]) -> None:
        """Count the tokens that a step has computed, by sequence."""
        for sequence, num_tokens in zip(sequences, counts, strict=True):
            sequence.num_computed_tokens += num_tokens

    def set_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Set how many tokens a sequence has computed, when it starts, forks or fails."""
        sequence.num_computed_tokens = num_tokens

    def set_drafts(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """Set the drafts that the next step of a sequence verifies. It loses them with its row."""
        self.num_drafted += bool(drafts) - bool(sequence.drafts)
        sequence.drafts = drafts

    def make_padding(self, sequence: Sequence) -> None:
        """Keep the row and blocks of a finished sequence until its static batch ends."""
        sequence.status = SequenceStatus.PADDING

    def swap_out(self, request: Request) -> list[BlockCopy]:
        """Move a running request to the swapped ones; its computed tokens stay computed. Return the copies to make."""
        held = [sequence for sequence in request.live if sequence.row != NO_ROW]
        moves = self._cache.swap.swap_out([sequence.seq_id for sequence in held])
        for sequence in held:
            self._free_row(sequence)
            sequence.status = SequenceStatus.SWAPPED
        self._remove(request)
        self._count_preemption(request)
        request.num_swapped_blocks = len(moves)
        self._enqueue(request, self.swapped)
        return moves

    def swap_in(self, request: Request) -> list[BlockCopy]:
        """Move a swapped request to the running ones, with rows for started sequences. Return the copies to make."""
        self.admit(request)
        swapped = [sequence for sequence in request.live if sequence.status is SequenceStatus.SWAPPED]
        moves = self._cache.swap.swap_in([sequence.seq_id for sequence in swapped])
        request.num_swapped_blocks += len(moves)
        for sequence in swapped:
            self.assign_row(sequence)
        return moves

    def release_for_recompute(self, request: Request) -> None:
        """Free the rows and blocks of a request and queue it again; tokens not found in the cache are recomputed."""
        for sequence in request.live:
            self._release(sequence)
            sequence.num_lost_tokens = max(sequence.num_lost_tokens, sequence.num_computed_tokens)
            sequence.num_computed_tokens = 0
            sequence.status = SequenceStatus.WAITING
        if _is_in(self.running, request):                               # else a swapped request, preempted before
            self._count_preemption(request)
        self._remove(request)
        self._enqueue(request, self.waiting)

    def hold_all_but(self, request_ids: Container[int]) -> None:
        """Keep all other requests from being admitted until `release_all`, while none of them runs.

        They keep what they have. Call it again after each arrival.
        """
        for request in [*self.waiting, *self.swapped]:
            if request.request_id not in request_ids:
                self._remove(request)
                insort(self.held, request, key=queue_key_of)
        for request in [each for each in self.held if each.request_id in request_ids]:
            self._release_held(request)

    def release_all(self) -> None:
        """Return all held requests to their queues."""
        for request in self.held.copy():
            self._release_held(request)

    def _release_held(self, request: Request) -> None:
        self._remove(request)
        is_swapped = any(sequence.status is SequenceStatus.SWAPPED for sequence in request.live)
        self._insert(request, self.swapped if is_swapped else self.waiting)

    def finish(self, request: Request, sequence: Sequence) -> None:
        """Finish a branch in any state; with the last one the request is removed."""
        self._release(sequence)
        sequence.status = SequenceStatus.FINISHED
        request.live.remove(sequence)
        self.num_running_seqs -= _is_in(self.running, request)
        if not request.live:
            self._remove(request)
            self._policy.finish(request)
            del self.requests[request.request_id]

    def _count_preemption(self, request: Request) -> None:
        request.num_preemptions += 1
        request.num_recomputed_tokens = request.num_swapped_blocks = 0

    def _enqueue(self, request: Request, queue: list[Request]) -> None:
        self.wait_reasons.start(request)
        self._insert(request, queue)

    def _insert(self, request: Request, queue: list[Request]) -> None:
        insort(queue, request, key=queue_key_of)
        if queue is self.waiting:
            self._policy.enqueue(request)
            self.lines.add(request)

    def _remove(self, request: Request) -> None:
        queues = (self.running, self.waiting, self.swapped, self.held)
        queue = next(each for each in queues if _is_in(each, request))
        del queue[bisect_left(queue, request.queue_key, key=queue_key_of)]
        if queue is self.running:
            self.num_running_seqs -= len(request.live)
        elif queue is self.waiting:
            self._policy.dequeue(request)
            self.wait_reasons.end_lack(request, self.lines.lack_of(request))
            self.lines.remove(request)

    def _release(self, sequence: Sequence) -> None:
        """Free the row and the blocks of a sequence; after a failed step it may have only one of them."""
        if sequence.seq_id in self._cache:
            self._cache.free(sequence.seq_id, sequence.num_computed_tokens)
        if sequence.row != NO_ROW:
            self._free_row(sequence)

    def _free_row(self, sequence: Sequence) -> None:
        self.set_drafts(sequence, ())
        self.free_rows.append(sequence.row)
        sequence.row = NO_ROW

    # --- invariants -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that each request is in one queue, in order, and that no row is lost or doubled."""
        for queue in (self.waiting, self.running, self.swapped, self.held):
            keys = [request.queue_key for request in queue]
            assert keys == sorted(keys), f"requests are out of order: {keys}"
        self.lines.check(self.waiting)
        num_queued = len(self.waiting) + len(self.swapped) + len(self.held)
        assert len(self.running) + num_queued == len(self.requests)
        sequences = [sequence for request in self.running for sequence in request.live]
        assert self.num_running_seqs == len(sequences), f"{self.num_running_seqs} of {len(sequences)} running sequences"
        assert self.num_drafted == sum(sequence.row != NO_ROW and bool(sequence.drafts) for sequence in sequences)
        rows = sorted([sequence.row for sequence in sequences if sequence.row != NO_ROW] + self.free_rows)
        assert rows == list(range(len(rows))), f"rows lost or doubled: {rows}"
        for sequence in sequences:
            assert (sequence.row != NO_ROW) == (sequence.status in {SequenceStatus.RUNNING, SequenceStatus.PADDING})


def _is_in(queue: list[Request], request: Request) -> bool:
    index = bisect_left(queue, request.queue_key, key=queue_key_of)
    return index < len(queue) and queue[index] is request
