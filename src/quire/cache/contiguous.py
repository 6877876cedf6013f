"""The cache without paging: one contiguous chunk per sequence, taken when it begins and kept to its end.

What the paper compares with (Kwon et al. 2023, section 6.1), behind the same door as paging: a chunk is a run of
blocks, so a table over it is a table like any other, and scheduler and kernels see no difference. Nothing is shared: a
fork is a copy of all that is filled, which runs in the next step, because in this one the source may still be filled.
How much a sequence reserves is the caller's matter (`quire.scheduling.reservation`).
"""

from collections import Counter
from dataclasses import replace

from quire.cache.block_pool import BlockPool
from quire.cache.block_table import BlockTable, TableUpdate
from quire.cache.buddy_pool import BuddyPool
from quire.cache.manager import KVCacheManager
from quire.cache.prefix_cache import NO_MATCH, PrefixMatch
from quire.cache.prefix_tree import Scope
from quire.core.config import CacheConfig
from quire.core.outputs import KVStats
from quire.core.plan import BlockCopy


class ContiguousManager(KVCacheManager):
    """A manager whose sequences each have all of their blocks from the start, in a row."""

    __slots__ = ("_copies", "_runs", "policy")

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(replace(config, sliding_window=None, enable_prefix_caching=False))
        self._pool = self._runs = BuddyPool(config.num_blocks)
        self.policy = config.memory_policy
        self._copies: dict[int, list[BlockCopy]] = {}  # into the blocks of a sequence, by its id; sources are held

    def num_chunks(self, num_tokens: int, *, when_empty: bool = False) -> int:
        """Return how many sequences could reserve so many tokens each, now or if nothing else were here."""
        return self._runs.num_runs(self.blocks_for(num_tokens), when_empty=when_empty)

    def create(
        self,
        seq_id: int,
        token_ids: list[int] | None = None,
        scope: Scope = None,
        match: PrefixMatch = NO_MATCH,
        *,
        keeps_all: bool = False,
        num_reserved: int = 0,
    ) -> None:
        """Begin a sequence that will have at most `num_reserved` tokens. OutOfBlocksError if there is no chunk."""
        self._refuse_taken(seq_id)
        self._tables[seq_id] = Reservation(self._pool, self.block_size, self.blocks_for(num_reserved))

    def fork(self, parent_id: int, child_id: int, token_ids: list[int] | None = None) -> None:
        """Begin a sequence with the tokens of another, and as much reserved. OutOfBlocksError if there is no chunk."""
        self._refuse_taken(child_id)
        parent = self._tables[parent_id]
        child = self._tables[child_id] = Reservation(self._pool, self.block_size, len(parent.blocks))
        child.append(parent.num_tokens)
        num_filled = self.blocks_for(parent.num_tokens)
        pairs = zip(parent.blocks[:num_filled], child.blocks[:num_filled], strict=True)
        copies = self._copies[child_id] = [BlockCopy(*pair) for pair in pairs]
        for src, _ in copies:
            self._pool.share(src)

    def free(self, seq_id: int, num_computed: int = 0) -> None:
        """End a sequence: its whole chunk is free, when no copy is left to be made from it."""
        self._drop_sources(self._copies.pop(seq_id, []))
        super().free(seq_id, num_computed)

    def take_copies(self) -> list[BlockCopy]:
        """Return, once, the copies that forks before this step have asked for."""
        if not self._copies:
            return []
        copies = [copy for each in self._copies.values() for copy in each]
        self._copies.clear()
        self._drop_sources(copies)  # what takes a freed source now is written after the copies
        self._num_copied += len(copies)
        return copies

    def stats(self) -> KVStats:
        """Return the state of the cache; what is reserved and empty, or lost to rounding, counts as tail waste."""
        stats = super().stats()
        num_tokens = sum(table.num_tokens for table in self._tables.values())
        return replace(stats, tail_waste_slots=stats.used_blocks * self.block_size - num_tokens)

    def _drop_sources(self, copies: list[BlockCopy]) -> None:
        for src, _ in copies:
            self._pool.release(src)

    def _held_besides(self) -> Counter[int]:
        return Counter(src for copies in self._copies.values() for src, _ in copies)


class Reservation(BlockTable):
    """A table that has all of its blocks from the start. It never grows, so no append changes a column."""

    __slots__ = ()

    def __init__(self, pool: BlockPool, block_size: int, num_blocks: int) -> None:
        super().__init__(pool, block_size)
        self.blocks = pool.allocate(num_blocks)
        self._writable_end = num_blocks * block_size

    def append(self, count: int) -> TableUpdate | None:
        """Give slots to `count` more tokens, of those reserved."""
        self.num_tokens += count
        assert self.num_tokens <= self._writable_end, f"{self.num_tokens} tokens, {self._writable_end} reserved"
        return None

    def check(self) -> None:
        """Assert that the blocks stand in a row and hold the tokens."""
        assert self.blocks == list(range(self.blocks[0], self.blocks[-1] + 1)), f"no run: {self.blocks}"
        assert 0 <= self.num_tokens <= self._writable_end == len(self.blocks) * self._block_size


def make_manager(config: CacheConfig) -> KVCacheManager:
    """Return the manager of the configuration's memory policy."""
    return KVCacheManager(config) if config.memory_policy == "paged" else ContiguousManager(config)
