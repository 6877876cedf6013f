"""SwapSpace: blocks outside of the cache, and the tables of swapped sequences.

A second `BlockPool` with the same block size. Tables move as they are, so what they shared they share again, and each
block moves once however many hold it. The copying itself is the step's, and what goes out goes first: so a block that
the step reads back is held until the step is over, or another could be written over it. Kwon et al. 2023, section 4.5.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from quire.cache.block_pool import BlockArray, BlockPool, OutOfBlocksError, run_to_the_end
from quire.cache.block_table import NULL_BLOCK, BlockTable
from quire.cache.block_view import check_holders, count_holders, view_all, view_blocks
from quire.cache.prefixes import Prefixes
from quire.core.block_map import BlockEntry, BlockOverview
from quire.core.outputs import KVStats
from quire.core.plan import BlockCopy


def distinct_blocks(tables: Iterable[BlockTable], num_blocks: int) -> BlockArray:
    """Return the blocks of some tables over a pool of `num_blocks`, each once, in the order of their first columns."""
    is_new, distinct = np.ones(num_blocks + 1, dtype=bool), [np.zeros(0, dtype=np.int64)]
    is_new[NULL_BLOCK] = False
    for table in tables:
        held = table.as_array()
        distinct.append(held[is_new[held]])
        is_new[held] = False
    return np.concatenate(distinct)


def places_of(blocks: BlockArray, places: BlockArray, num_blocks: int) -> BlockArray:
    """Return, by block of a pool of `num_blocks`, the place of each of `blocks` in another; the last is NULL_BLOCK."""
    by_block = np.full(num_blocks + 1, NULL_BLOCK, dtype=np.int64)
    by_block[blocks] = places
    return by_block


class Footprint(NamedTuple):
    """The blocks of a group, each counted once, and how many of them have other owners."""

    num_blocks: int
    num_held_by_others: int


class SwapSpace:
    """The tables of sequences that are swapped out, over a pool of their own, which may have no block."""

    __slots__ = ("_num_swapped_in", "_num_swapped_out", "_pool", "_tables", "sources")

    def __init__(self, num_blocks: int) -> None:
        self._pool = BlockPool(num_blocks, may_be_empty=True)
        self._tables: dict[int, BlockTable] = {}
        self.sources: list[BlockArray] = []  # blocks that the step under way reads back
        self._num_swapped_out = self._num_swapped_in = 0  # blocks, since start

    def __contains__(self, seq_id: int) -> bool:
        """Return whether a sequence is swapped out."""
        return seq_id in self._tables

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken."""
        return self._pool.num_free_blocks

    def table(self, seq_id: int) -> BlockTable:
        """Return the table of a sequence that is swapped out."""
        return self._tables[seq_id]

    def swap_out(self, tables: Mapping[int, BlockTable], pool: BlockPool) -> list[BlockCopy]:
        """Take in the tables of a group, by sequence id; return what has to be copied (src in the cache's `pool`).

        Raises OutOfBlocksError, and changes nothing, for want of blocks. The given tables are left as they are.
        """
        blocks = distinct_blocks(tables.values(), pool.num_blocks)
        taken = _as_array(self._pool.allocate(len(blocks)))
        places = places_of(blocks, taken, pool.num_blocks)
        for seq_id, table in tables.items():
            self._tables[seq_id] = table.relocate(self._pool, places)
        self._pool.release_all(taken)                            # the tables own them now
        self._num_swapped_out += len(taken)
        return list(map(BlockCopy, blocks.tolist(), taken.tolist()))

    def num_blocks_to_swap_in(self, seq_ids: Sequence[int], pool: BlockPool, found: Mapping[int, int]) -> int:
        """Return how many blocks of the cache's pool `swap_in` would take, cached ones that it finds included."""
        num_missing = len(self._distinct_blocks(seq_ids)) - len(found)
        return num_missing + sum(pool.ref_count(block) == 0 for block in set(found.values()))

    def swap_in(
        self, seq_ids: Sequence[int], pool: BlockPool, found: Mapping[int, int]
    ) -> tuple[dict[int, BlockTable], list[BlockCopy]]:
        """Return the tables of a group, now in the cache's pool, and what has to be copied (dst in the cache).

        `found`: swap blocks with a copy in the cache, and its block. Raises OutOfBlocksError, and changes
        nothing, for want of blocks.
        """
        if (need := self.num_blocks_to_swap_in(seq_ids, pool, found)) > pool.num_free_blocks:
            raise OutOfBlocksError(f"need {need} blocks, {pool.num_free_blocks} of {pool.num_blocks} are free")
        ours = self._distinct_blocks(seq_ids)
        places = places_of(_as_array(found), _as_array(found.values()), self._pool.num_blocks)
        held = np.unique(_as_array(found.values()))
        pool.share_all(held)                                     # else the next line could evict them
        missing = ours[places[ours] == NULL_BLOCK]
        try:
            copied = _as_array(pool.allocate(len(missing)))
        except BaseException:                                    # not for want of blocks: that was looked at above
            pool.release_all(held)
            raise
        places[missing] = copied
        self._pool.share_all(missing)
        self.sources.append(missing)
        tables = {seq_id: self.table(seq_id).relocate(pool, places) for seq_id in seq_ids}
        pool.release_all(np.concatenate([held, copied]))         # the tables own them now
        for seq_id in seq_ids:
            self.free(seq_id)
        self._num_swapped_in += len(missing)
        return tables, list(map(BlockCopy, missing.tolist(), copied.tolist()))

    def free(self, seq_id: int) -> None:
        """Give up the blocks of a sequence: it has ended, or stands in the cache again."""
        self._tables.pop(seq_id).free()

    def end_step(self) -> None:
        """End the step under way, failed or not: release the blocks that it read back."""
        while self.sources:
            self._pool.release_all(self.sources.pop())

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

    def view_all(self) -> BlockOverview:
        """Return all blocks in a few spans."""
        return view_all(self._pool, self._tables)

    def check(self) -> None:
        """Assert that pool and tables are sound, and reference counts equal to holders."""
        run_to_the_end(self.checking())

    def checking(self) -> Iterator[None]:
        """Check in slices."""
        yield from self._pool.checking()
        for table in self._tables.values():
            table.check()
            yield
        held_besides = [block for blocks in self.sources for block in blocks.tolist()]
        check_holders(self._pool, self._tables.values(), held_besides)
        yield

    def _distinct_blocks(self, seq_ids: Iterable[int]) -> BlockArray:
        return distinct_blocks(map(self.table, seq_ids), self._pool.num_blocks)


class CacheSwap:
    """Swapping of sequence groups between a cache, by its tables and prefixes, and its swap space."""

    def __init__(self, space: SwapSpace, tables: dict[int, BlockTable], prefixes: Prefixes) -> None:
        self._space, self._tables, self._prefixes = space, tables, prefixes

    def footprint(self, seq_ids: Sequence[int]) -> Footprint:
        """Return how many blocks some sequences in the cache hold together."""
        pool = self._prefixes.pool
        holders = count_holders((self._tables[seq_id] for seq_id in seq_ids), pool.num_blocks)
        held = np.flatnonzero(holders)
        return Footprint(len(held), int(np.count_nonzero(pool.ref_counts(held) > holders[held])))

    def swap_out(self, seq_ids: Sequence[int]) -> list[BlockCopy]:
        """Move a sequence group to the swap space; return the copies to make, before all other copies of the step.

        The group appends nothing in this step. Raises OutOfBlocksError, and changes nothing, for want of swap blocks.
        What could be found in the cache still can.
        """
        tables = {seq_id: self._tables[seq_id] for seq_id in seq_ids}
        for table in tables.values():
            assert table.path is None or not table.path.swap_in_pending, f"{seq_ids} swapped in and out in one step"
        self._prefixes.drop_unseen(tables.values())
        copies = self._space.swap_out(tables, self._prefixes.pool)
        for seq_id, table in tables.items():
            self._prefixes.free(table, table.num_tokens)
            del self._tables[seq_id]
        return copies

    def num_blocks_to_swap_in(self, seq_ids: Sequence[int]) -> int:
        """Return how many blocks `swap_in` would take."""
        found, _ = self._found(seq_ids)
        return self._space.num_blocks_to_swap_in(seq_ids, self._prefixes.pool, found)

    def swap_in(self, seq_ids: Sequence[int]) -> list[BlockCopy]:
        """Move a sequence group back; return the copies to make after all swap-outs. Cached blocks are not copied.

        Raises OutOfBlocksError, and changes nothing, when the pool lacks blocks.
        """
        found, num_found = self._found(seq_ids)
        tables, copies = self._space.swap_in(seq_ids, self._prefixes.pool, found)
        self._tables.update(tables)
        for seq_id, table in tables.items():
            self._prefixes.swap_in(table, num_found[seq_id])
        return copies

    def _found(self, seq_ids: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
        """Return which blocks of swapped sequences have their content in the prefix cache, too, and where.

        And how many leading columns of each sequence those are, the ones that have left the window included.
        """
        found, num_found = dict[int, int](), dict[int, int]()
        for seq_id in seq_ids:
            table = self._space.table(seq_id)
            places = self._prefixes.find(table)
            found.update(zip(table.columns, places, strict=False))
            num_found[seq_id] = len(places)
        found.pop(NULL_BLOCK, None)
        return found, num_found


def _as_array(blocks: Collection[int]) -> BlockArray:
    return np.fromiter(blocks, dtype=np.int64, count=len(blocks))
