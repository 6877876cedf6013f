"""Baselines without paging (Kwon et al. 2023, section 6.1): contiguous runs of blocks, and Orca's reservations.

A run stands in a chunk: the smallest power of two of blocks that holds it. The pool need not be a power of two: it is
cut into regions that are, the largest first, so that every chunk begins at a multiple of its size, and its buddy is
where one bit of its first block differs. Two free buddies become one chunk.
Invariant after every call: each block is in one free chunk, or in the chunk of one run.

What the paper compares with (Kwon et al. 2023, section 6.1), with the same interface as paging: a chunk is a run of
blocks, so a table over it is a table like any other, and scheduler and kernels see no difference. Nothing is shared: a
fork is a copy of all that is filled, which runs in the next step, because in this one the source may still be filled.

`contiguous-max` reserves the longest possible sequence, `contiguous-pow2` the prompt and the next power of two of the
true output length, `contiguous-oracle` the true lengths. The true output length is the request's max_tokens: an oracle
knows it where the end of sequence is ignored. An admitted request never needs more, so none is ever preempted.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import cast

from quire.cache.block_pool import BlockArray, BlockPool, OutOfBlocksError
from quire.cache.block_table import BlockTable, TableUpdate, blocks_for
from quire.cache.manager import KVCacheManager
from quire.cache.prefix_tree import PrefixMatch
from quire.core.config import CacheConfig, MemoryPolicy, SchedulerConfig
from quire.core.deltas import WaitReason
from quire.core.errors import ContextLengthError
from quire.core.plan import BlockCopy
from quire.core.sequence import NO_ROW, Request
from quire.scheduling.admission import AdmissionControl
from quire.scheduling.queues import RequestQueues


class BuddyPool(BlockPool):
    """Blocks 0..num_blocks - 1. What a chunk has more than its run needs is lost for as long as the run lasts."""

    __slots__ = ("_chunk_of", "_free", "_num_free", "_num_held", "_orders")

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._free: list[set[int]] = [set() for _ in range(num_blocks.bit_length())]  # first blocks, by order
        self._orders: dict[int, int] = {}      # orders of the chunks of runs, by their first blocks
        self._num_held: dict[int, int] = {}    # blocks with an owner in each of them
        self._chunk_of = [0] * num_blocks      # the first block of the chunk that a block in use stands in
        self._num_free = num_blocks
        for order in range(num_blocks.bit_length()):
            if num_blocks >> order & 1:        # the larger regions lie before it
                self._free[order].add((num_blocks >> order + 1) << order + 1)

    @property
    def num_free_blocks(self) -> int:
        """Blocks in free chunks."""
        return self._num_free

    def num_runs(self, length: int, *, when_empty: bool = False) -> int:
        """Return how many runs of `length` blocks could be allocated now, or if nothing else were in the pool."""
        order = _order(length)
        if when_empty:
            return self.num_blocks >> order
        return sum(len(chunks) << larger - order for larger, chunks in enumerate(self._free) if larger >= order)

    def allocate(self, count: int) -> list[int]:
        """Return a run of `count` blocks with one owner each, or raise OutOfBlocksError and change nothing.

        It comes from the smallest free chunk that holds it, of equal ones from the lowest.
        """
        order = _order(count)
        larger = next((each for each in range(order, len(self._free)) if self._free[each]), None)
        if larger is None:
            raise OutOfBlocksError(f"no chunk of {1 << order} blocks: {self._num_free} of {self.num_blocks} are free")
        first = min(self._free[larger])
        self._free[larger].remove(first)
        for smaller in range(order, larger):
            self._free[smaller].add(first + (1 << smaller))
        run = list(range(first, first + count))
        for block in run:
            self._set_owners(block, 0, 1)
            self._chunk_of[block] = first
        self._orders[first], self._num_held[first] = order, count
        self._num_free -= 1 << order
        return run

    def release(self, block: int) -> None:
        """Drop one owner. When the last one of a whole run goes, its chunk is free."""
        owners = self.ref_count(block)
        assert owners > 0, f"block {block} freed twice"
        self._set_owners(block, owners, owners - 1)
        first = self._chunk_of[block]
        self._num_held[first] -= owners == 1
        if self._num_held[first] == 0:
            del self._num_held[first]
            self._free_chunk(first, self._orders.pop(first))

    def release_all(self, blocks: BlockArray) -> None:
        """Drop one owner of each of several blocks."""
        for block in blocks.tolist():
            self.release(block)

    def _free_chunk(self, first: int, order: int) -> None:
        """Free a chunk; merge it with its buddy as long as that is free, too."""
        self._num_free += 1 << order
        while (buddy := first ^ 1 << order) in self._free[order]:
            self._free[order].remove(buddy)
            first, order = min(first, buddy), order + 1
        self._free[order].add(first)

    def checking(self) -> Iterator[None]:
        """Assert that chunks cover the pool, each block once, that none has a free buddy, and that all is counted."""
        free = {first: order for order, chunks in enumerate(self._free) for first in chunks}
        ends = dict[int, int]()
        for first, order in (free | self._orders).items():
            assert first % (1 << order) == 0, f"a chunk of {1 << order} blocks begins at {first}"
            assert first ^ 1 << order not in self._free[order] or first in self._orders, f"{first} has a free buddy"
            ends[first] = first + (1 << order)
        edges = sorted([*ends, self.num_blocks])
        assert [0, *sorted(ends.values())] == edges, f"free chunks {free}, of runs {self._orders}"
        assert self._num_free == sum(1 << order for order in free.values()), f"{self._num_free} free, but {free}"
        held = Counter(self._chunk_of[block] for block, owners in enumerate(self._ref_counts) if owners)
        assert held == self._num_held, f"{held} blocks with owners, but {self._num_held} were counted"
        counted, walked = self.count_blocks_by_owners(), Counter(self._ref_counts)
        assert counted == walked, f"blocks by owners are {walked}, but {counted} were counted"
        yield  # all in one slice: this pool is for comparisons, not for service


def _order(length: int) -> int:
    """Return the order of the chunk that holds a run: its size is two to the power of that."""
    assert length >= 1, f"a run of {length} blocks"
    return (length - 1).bit_length()


class Reservation(BlockTable):
    """A table that has all of its blocks from the start. It never grows, so no append changes a column."""

    __slots__ = ("copies",)

    def __init__(self, pool: BlockPool, block_size: int, num_blocks: int) -> None:
        """Take a run of blocks. OutOfBlocksError if there is no chunk for it."""
        super().__init__(pool, block_size)
        self.columns = array("q", pool.allocate(num_blocks))
        self._writable_end = num_blocks * block_size
        self.copies: list[BlockCopy] = []   # into it, still to be made; their sources are held

    def append(self, count: int) -> TableUpdate | None:
        """Give slots to `count` more tokens, of those reserved."""
        self.num_tokens += count
        assert self.num_tokens <= self._writable_end, f"{self.num_tokens} tokens, {self._writable_end} reserved"
        return None

    def truncate(self, num_tokens: int) -> None:
        """Take back computed tokens; their slots stay reserved."""
        assert 0 <= num_tokens <= self.num_tokens, f"{num_tokens} tokens cannot stay of {self.num_tokens}"
        self.num_tokens = num_tokens

    def rewind(self) -> None:
        """Let the last token be computed and written once more."""
        self.num_tokens -= 1

    def fork(self) -> "Reservation":
        """Return a table of the same tokens, with as much reserved. OutOfBlocksError if there is no chunk."""
        child = Reservation(self._pool, self._block_size, len(self.columns))
        child.append(self.num_tokens)
        num_filled = blocks_for(self.num_tokens, self._block_size)
        child.copies = [BlockCopy(*pair) for pair in zip(self.blocks[:num_filled], child.columns, strict=False)]
        self._pool.share_all(self.as_array()[:num_filled])
        return child

    def take_copies(self) -> list[BlockCopy]:
        """Return, once, what is to be copied, and let go of the sources: whatever takes one is written afterwards."""
        copies, self.copies = self.copies, []
        for src, _ in copies:
            self._pool.release(src)
        return copies

    def free(self) -> None:
        """Give up the whole run, which is free when no copy is left to be made from it."""
        self.take_copies()
        super().free()

    def check(self) -> None:
        """Assert that the blocks stand in a row and hold the tokens."""
        blocks = self.blocks
        assert blocks == list(range(blocks[0], blocks[-1] + 1)), f"no run: {blocks}"
        assert 0 <= self.num_tokens <= self._writable_end == len(blocks) * self._block_size


class ContiguousManager(KVCacheManager):
    """A manager that gives each sequence all of its blocks from the start, in a row."""

    copies_forks = True

    __slots__ = ("_runs", "policy")

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(replace(config, sliding_window=None, enable_prefix_caching=False))
        self._pool = self._runs = BuddyPool(config.num_blocks)
        self.policy = config.memory_policy

    def num_chunks(self, num_tokens: int, *, when_empty: bool = False) -> int:
        """Return how many sequences could reserve so many tokens each, now or if nothing else were here."""
        return self._runs.num_runs(self.blocks_for(num_tokens), when_empty=when_empty)

    def refork(self, parent_id: int, child_id: int, token_ids: Sequence[int] | None = None) -> None:
        """End a sequence and begin it again as a fork of another, in another chunk."""
        self.free(child_id)
        self.fork(parent_id, child_id, token_ids)

    def take_copies(self) -> list[BlockCopy]:
        """Return, once, the copies that forks before this step have asked for."""
        copies = [copy for table in self._reservations() if table.copies for copy in table.take_copies()]
        self._num_copied += len(copies)
        return copies

    def _new_table(self, num_reserved: int) -> Reservation:
        return Reservation(self._pool, self.block_size, self.blocks_for(num_reserved))

    def _reservations(self) -> Iterable[Reservation]:
        return cast(Iterable[Reservation], self._tables.values())

    def _held_besides(self) -> Iterable[int]:
        return [src for table in self._reservations() for src, _ in table.copies]

    def _tail_waste_slots(self) -> int:
        """Count what is reserved and empty, or lost to rounding."""
        num_slots = (self.num_blocks - self.num_free_blocks) * self.block_size
        return num_slots - sum(table.num_tokens for table in self._reservations())


def num_reserved_tokens(policy: MemoryPolicy, num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> int:
    """Return how many tokens of one sequence are reserved."""
    if policy == "contiguous-max":
        return max_model_len
    output_len = 1 << (max_tokens - 1).bit_length() if policy == "contiguous-pow2" else max_tokens
    return min(num_prompt_tokens + output_len, max_model_len)


class ReservingAdmission(AdmissionControl):
    """Admits a request when there is a chunk for each of its sequences.

    Those that wait for the first one's prompt take theirs when they fork. No request is admitted before that.
    """

    def __init__(self, queues: RequestQueues, cache: KVCacheManager, config: SchedulerConfig) -> None:
        assert isinstance(cache, ContiguousManager), "nothing is reserved in paged memory"
        super().__init__(queues, cache, config)
        self._chunks, self._policy = cache, cache.policy
        self._is_fork_pending = False  # a running request has sequences that have no chunks yet

    def check_admissible(self, request: Request) -> None:
        """Raise ContextLengthError if there could never be a chunk for each sequence."""
        num_tokens, n = self.num_reserved(request), len(request.live)
        num_chunks = self._chunks.num_chunks(num_tokens, when_empty=True)
        if num_chunks < n:
            raise ContextLengthError(
                f"memory_policy {self._policy} reserves {num_tokens} tokens for each of {n} sequences, but only "
                f"{num_chunks} of these fit in {self._cache.num_blocks} KV blocks of {self._cache.block_size} tokens"
            )

    def num_reserved(self, request: Request) -> int:
        """Return how many tokens each sequence of a request reserves."""
        num_prompt_tokens = len(request.prompt_token_ids)
        return num_reserved_tokens(self._policy, num_prompt_tokens, request.max_tokens, self._config.max_model_len)

    def start_step(self) -> None:
        """Begin a step."""
        super().start_step()
        self._is_fork_pending = False

    def reserve(self, request: Request) -> None:
        """Keep back all that is free while sequences of a request have no chunks."""
        self._is_fork_pending |= any(sequence.row == NO_ROW for sequence in request.live)

    def shortage(self, request: Request) -> WaitReason | None:
        """Return what is short: rows for a request's sequences, or chunks, where a fork is pending."""
        if self._queues.num_running_seqs + len(request.live) > self._config.max_num_seqs:
            return "max_num_seqs"
        return "kv_blocks" if self._is_fork_pending else None

    def num_spare_blocks(self, request: Request, match: PrefixMatch) -> int:
        """Return 0 if there is a chunk for each sequence, else -1."""
        return 0 if self._chunks.num_chunks(self.num_reserved(request)) >= len(request.live) else -1
