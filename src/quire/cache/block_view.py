"""Views of the blocks of a pool, for people and checks: state, references, and the tables that hold them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from quire.cache.block_pool import BlockPool
from quire.cache.block_table import NULL_BLOCK, BlockTable
from quire.core.block_map import MAX_OWNERS_SHOWN, MAX_SPANS, BlockEntry, BlockOverview, BlockOwner, Tier


def view_blocks(
    pool: BlockPool, tables: Mapping[int, BlockTable], block_size: int, first: int, count: int, tier: Tier
) -> list[BlockEntry]:
    """Return blocks [first, first + count), as far as there are any. Linear in `count` and in all tables' columns."""
    stop = min(first + count, pool.num_blocks)
    entries = [
        BlockEntry(block, pool.state(block), tier, pool.ref_count(block), []) for block in range(first, stop)
    ]
    for seq_id, table in tables.items():
        blocks, num_filled = table.as_array(), table.num_filled
        for column in np.flatnonzero((blocks >= first) & (blocks < stop)).tolist():
            owners = entries[table.columns[column] - first].owners
            if len(owners) < MAX_OWNERS_SHOWN:
                filled = max(0, min(block_size, num_filled - column * block_size))  # 0: kept for tokens to come
                owners.append(BlockOwner(seq_id, column, filled))
    return entries


def view_all(pool: BlockPool, tables: Mapping[int, BlockTable]) -> BlockOverview:
    """Return the whole pool in at most MAX_SPANS spans. Linear in its cached blocks and in all tables' columns."""
    span = max(1, -(-pool.num_blocks // MAX_SPANS))
    num_spans = -(-pool.num_blocks // span)
    used = np.add.reduceat(pool.ref_counts() > 0, np.arange(0, pool.num_blocks, span), dtype=np.int64)
    cached = np.bincount(pool.cached_blocks() // span, minlength=num_spans)
    most = np.zeros(num_spans, dtype=np.int64)
    holders: list[int | None] = [None] * num_spans
    for holder, table in tables.items():
        blocks = table.as_array()
        held = np.bincount(blocks[blocks != NULL_BLOCK] // span, minlength=num_spans)
        for place in np.flatnonzero(held > most).tolist():
            holders[place] = holder
        np.maximum(most, held, out=most)
    return BlockOverview(span, used.tolist(), cached.tolist(), holders)


def histogram(num_blocks_by_owners: Counter[int]) -> dict[str, int]:
    """Return how many blocks have 1, 2, 3-4, 5-8, 9+ owners."""
    labels = ("1", "2", "3-4", "5-8", "9+")
    histogram = dict.fromkeys(labels, 0)
    for owners, num_blocks in num_blocks_by_owners.items():
        octave = (owners - 1).bit_length()  # the upper ends 1, 2, 4, 8 are powers of two
        histogram[labels[min(octave, len(labels) - 1)]] += num_blocks
    return histogram


def count_blocks(tables: Iterable[BlockTable], num_blocks: int) -> int:
    """Return how many of a pool's `num_blocks` blocks tables hold, each counted once. Linear in their columns."""
    held = np.zeros(num_blocks + 1, dtype=bool)  # the last place is NULL_BLOCK's
    for table in tables:
        held[table.as_array()] = True
    return int(np.count_nonzero(held[:num_blocks]))


def count_holders(tables: Iterable[BlockTable], num_blocks: int) -> NDArray[np.int32]:
    """Return how many of these tables hold each of a pool's `num_blocks` blocks. Linear in their columns."""
    holders = np.zeros(num_blocks + 1, dtype=np.int32)
    for table in tables:
        held = table.as_array()
        holders[held] += 1  # no table holds a block twice but NULL_BLOCK, which has the last place
    return holders[:num_blocks]


def checking_blocks(
    pool: BlockPool, tables: Mapping[int, BlockTable], held_besides: Iterable[int], block_size: int
) -> Iterator[None]:
    """Assert, in slices, that pool and tables are sound, and that each block has as many owners as it has holders.

    A block that several tables hold must hold equally many tokens of each: no table may write to a shared block.
    """
    yield from pool.checking()
    filled_by_block = np.full(pool.num_blocks, -1, dtype=np.int32)
    for holder, table in tables.items():
        table.check()
        blocks = table.as_array()
        filled = np.minimum(block_size, table.num_filled - block_size * np.arange(len(blocks)))[blocks != NULL_BLOCK]
        blocks = blocks[blocks != NULL_BLOCK]
        if table.is_cut:                                    # it is filled further by those that share it
            blocks, filled = blocks[:-1], filled[:-1]
        before = filled_by_block[blocks]
        wrong = blocks[(before != filled) & (before != -1)]
        assert not len(wrong), f"holder {holder} wrote into {', '.join(map(str, wrong))}"
        filled_by_block[blocks] = filled
        yield
    check_holders(pool, tables.values(), held_besides)
    yield


def check_holders(pool: BlockPool, tables: Iterable[BlockTable], held_besides: Iterable[int]) -> None:
    """Assert that each block has as many owners as there are tables and other holders."""
    holders = count_holders(tables, pool.num_blocks)
    np.add.at(holders, list(held_besides), 1)
    owners = pool.ref_counts()
    wrong = np.flatnonzero(owners != holders)
    assert not len(wrong), f"blocks {wrong} have {owners[wrong]} owners, but held {holders[wrong]} times"
