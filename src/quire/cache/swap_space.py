"""SwapSpace: blocks outside of the cache, and the tables of the sequences that stand there.

A second `BlockPool` with the same block size. Tables move as they are, so what they shared they share again, and each
block moves once however many hold it. The copying itself is the step's, and what goes out goes first: so a block that
the step reads back is held until the step is over, or another could be written over it. Kwon et al. 2023, section 4.5.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from quire.cache.block_pool import BlockPool, OutOfBlocksError
from quire.cache.block_table import NULL_BLOCK, BlockTable
from quire.cache.block_view import view_blocks
from quire.core.block_map import BlockEntry
from quire.core.outputs import KVStats
from quire.core.plan import BlockCopy


def distinct_blocks(tables: Iterable[BlockTable]) -> list[int]:
    """Return the blocks of some tables, each once, in the order of their first columns."""
    return [block for block in dict.fromkeys(b for table in tables for b in table.blocks) if block != NULL_BLOCK]


class Footprint(NamedTuple):
    """The blocks of a gang, each counted once, and how many of them others hold as well."""

    num_blocks: int
    num_held_by_others: int


class SwapSpace:
    """The tables of sequences that are swapped out, over a pool of their own."""

    __slots__ = ("_num_swapped_in", "_num_swapped_out", "_pool", "_sources", "_tables")

    def __init__(self, num_blocks: int) -> None:
        self._pool = BlockPool(num_blocks)
        self._tables: dict[int, BlockTable] = {}
        self._sources: list[int] = []        # blocks that the step under way reads back
        self._num_swapped_out = self._num_swapped_in = 0  # blocks, since start

    def __contains__(self, seq_id: int) -> bool:
        """Whether a sequence is swapped out."""
        return seq_id in self._tables

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken."""
        return self._pool.num_free_blocks

    def table(self, seq_id: int) -> BlockTable:
        """Return the table of a sequence that is swapped out."""
        return self._tables[seq_id]

    def take(self, tables: Mapping[int, BlockTable]) -> list[BlockCopy]:
        """Take in the tables of a gang, by sequence id; return what has to be copied (src in the cache).

        Raises OutOfBlocksError, and changes nothing, for want of blocks. The given tables are left as they are.
        """
        blocks = distinct_blocks(tables.values())
        places = dict(zip(blocks, self._pool.allocate(len(blocks)), strict=True))
        for seq_id, table in tables.items():
            self._tables[seq_id] = table.moved(self._pool, places)
        for place in places.values():
            self._pool.release(place)                            # the tables own it now
        self._num_swapped_out += len(places)
        return [BlockCopy(*pair) for pair in places.items()]

    def num_blocks_to_return(self, seq_ids: Sequence[int], pool: BlockPool, found: Mapping[int, int]) -> int:
        """Return how many blocks of the cache's pool `give_back` would take, cached ones that it finds included."""
        num_missing = sum(block not in found for block in distinct_blocks(map(self.table, seq_ids)))
        return num_missing + sum(pool.ref_count(block) == 0 for block in set(found.values()))

    def give_back(
        self, seq_ids: Sequence[int], pool: BlockPool, found: Mapping[int, int]
    ) -> tuple[dict[int, BlockTable], list[BlockCopy]]:
        """Return the tables of a gang, now in the cache's pool, and what has to be copied (dst in the cache).

        `found`: blocks of ours whose content stands in the cache, and where. Raises OutOfBlocksError, and changes
        nothing, for want of blocks.
        """
        if (need := self.num_blocks_to_return(seq_ids, pool, found)) > pool.num_free_blocks:
            raise OutOfBlocksError(f"need {need} blocks, {pool.num_free_blocks} of {pool.num_blocks} are free")
        for block in found.values():
            pool.share(block)                                    # else the next line could evict it
        missing = [block for block in distinct_blocks(map(self.table, seq_ids)) if block not in found]
        try:
            copied = dict(zip(missing, pool.allocate(len(missing)), strict=True))
        except BaseException:                                    # not for want of blocks: that was looked at above
            for block in found.values():
                pool.release(block)
            raise
        places = {**found, **copied}
        for block in missing:
            self._pool.share(block)
        self._sources += missing
        tables = {seq_id: self.table(seq_id).moved(pool, places) for seq_id in seq_ids}
        for block in places.values():
            pool.release(block)                                  # the tables own it now
        for seq_id in seq_ids:
            self.free(seq_id)
        self._num_swapped_in += len(missing)
        return tables, [BlockCopy(*pair) for pair in copied.items()]

    def free(self, seq_id: int) -> None:
        """Give up the blocks of a sequence: it has ended, or stands in the cache again."""
        self._tables.pop(seq_id).free()

    def end_step(self) -> None:
        """Take down that the step under way is over, well or not: nobody reads back any more."""
        while self._sources:
            self._pool.release(self._sources.pop())

    def add_stats(self, stats: KVStats) -> KVStats:
        """Return the cache's figures together with ours."""
        return replace(
            stats,
            swap_total_blocks=self._pool.num_blocks,
            swap_used_blocks=self._pool.num_blocks - self._pool.num_free_blocks,
            swapped_out_blocks=self._num_swapped_out,
            swapped_in_blocks=self._num_swapped_in,
        )

    def view_blocks(self, block_size: int, first: int, count: int) -> list[BlockEntry]:
        """Return what blocks [first, first + count) are, and which sequences hold them."""
        return view_blocks(self._pool, self._tables, block_size, first, count, "swap")

    def check(self) -> None:
        """Assert that pool and tables are sound, and reference counts equal to holders."""
        self._pool.check()
        holders = Counter(self._sources)
        for table in self._tables.values():
            table.check()
            holders.update(block for block in table.blocks if block != NULL_BLOCK)
        counts = {block: self._pool.ref_count(block) for block in range(self._pool.num_blocks)}
        assert {block: n for block, n in counts.items() if n} == holders, f"swap space: {counts} but held {holders}"
