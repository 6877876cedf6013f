"""The cache without paging: one contiguous chunk per sequence, taken when it begins and kept to its end.

What the paper compares with (Kwon et al. 2023, section 6.1), with the same interface as paging: a chunk is a run of
blocks, so a table over it is a table like any other, and scheduler and kernels see no difference. Nothing is shared: a
fork is a copy of all that is filled, which runs in the next step, because in this one the source may still be filled.
How much a sequence reserves is the caller's matter (`quire_lab.baselines.reservation`).
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

from quire.cache.block_pool import BlockPool
from quire.cache.block_table import BlockTable, TableUpdate, blocks_for
from quire.cache.manager import KVCacheManager
from quire.core.config import CacheConfig
from quire.core.plan import BlockCopy
from quire_lab.baselines.buddy_pool import BuddyPool


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
