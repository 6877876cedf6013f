"""SwapSpace: tables move to another pool and back, each block once. Block size 4."""

import pytest

from quire.cache.block_pool import BlockPool, OutOfBlocksError
from quire.cache.block_table import NULL_BLOCK, BlockTable
from quire.cache.swap_space import SwapSpace, distinct_blocks
from quire.core.plan import BlockCopy


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(8)


@pytest.fixture
def group(pool: BlockPool) -> dict[int, BlockTable]:
    """Two tables that share their first two blocks, 0 and 1, and have one block each besides."""
    first = BlockTable(pool, 4)
    first.append(8)
    second = first.fork()
    first.append(2)
    second.append(3)
    return {1: first, 2: second}


def swapped_out(space: SwapSpace, group: dict[int, BlockTable], pool: BlockPool) -> list[BlockCopy]:
    """Move a sequence group out of the cache."""
    copies = space.swap_out(group, pool)
    for table in group.values():
        table.free()
    return copies


def test_block_moves_once_however_many_hold_it(pool: BlockPool, group: dict[int, BlockTable]) -> None:
    space = SwapSpace(6)
    assert swapped_out(space, group, pool) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert (space.num_free_blocks, pool.num_free_blocks) == (2, 8)
    assert [space.table(seq_id).blocks for seq_id in (1, 2)] == [[0, 1, 2], [0, 1, 3]]
    assert 1 in space
    space.check()


def test_group_comes_back_sharing_what_it_shared(pool: BlockPool, group: dict[int, BlockTable]) -> None:
    space = SwapSpace(6)
    swapped_out(space, group, pool)
    pool.allocate(2)
    tables, copies = space.swap_in([1, 2], pool, {})
    assert copies == [(src, tables[1].blocks[src] if src < 3 else tables[2].blocks[2]) for src in range(4)]
    assert tables[1].blocks[:2] == tables[2].blocks[:2]
    assert [pool.ref_count(block) for block in (*tables[1].blocks, tables[2].blocks[2])] == [2, 2, 1, 1]
    assert [table.num_tokens for table in tables.values()] == [10, 11]
    assert 1 not in space
    for part in (pool, space, *tables.values()):
        part.check()


def test_too_small_a_space_takes_nothing(pool: BlockPool, group: dict[int, BlockTable]) -> None:
    space = SwapSpace(3)
    with pytest.raises(OutOfBlocksError, match="need 4 blocks, 3 of 3 are free"):
        space.swap_out(group, pool)
    assert (1 in space, space.num_free_blocks) == (False, 3)
    space.check()


def test_too_full_a_cache_gets_nothing_back(pool: BlockPool, group: dict[int, BlockTable]) -> None:
    space = SwapSpace(6)
    swapped_out(space, group, pool)
    pool.allocate(5)
    with pytest.raises(OutOfBlocksError, match="need 4 blocks, 3 of 8 are free"):
        space.swap_in([1, 2], pool, {})
    assert (1 in space, 2 in space, pool.num_free_blocks) == (True, True, 3)
    pool.check()
    space.check()


def test_what_the_cache_holds_is_shared_instead_of_copied(pool: BlockPool, group: dict[int, BlockTable]) -> None:
    space = SwapSpace(6)
    swapped_out(space, group, pool)
    held = pool.allocate(2)
    found = {0: held[0], 1: held[1]}
    assert space.num_blocks_to_swap_in([1, 2], pool, found) == 2
    tables, copies = space.swap_in([1, 2], pool, found)
    assert [copy.src for copy in copies] == [2, 3]
    assert tables[1].blocks[:2] == tables[2].blocks[:2] == held
    assert [pool.ref_count(block) for block in held] == [3, 3]


def test_equal_blocks_that_moved_apart_come_back_as_one(pool: BlockPool) -> None:
    tables = {seq_id: BlockTable(pool, 4) for seq_id in (1, 2)}
    for table in tables.values():
        table.append(4)
    space = SwapSpace(4)
    swapped_out(space, tables, pool)
    (held,) = pool.allocate(1)
    back, copies = space.swap_in([1, 2], pool, {0: held, 1: held})
    assert ([table.blocks for table in back.values()], copies) == ([[held], [held]], [])
    assert pool.ref_count(held) == 3
    pool.check()


def test_what_is_read_back_is_not_overwritten_in_the_same_step(pool: BlockPool, group: dict[int, BlockTable]) -> None:
    space = SwapSpace(4)
    swapped_out(space, group, pool)
    back, _ = space.swap_in([1, 2], pool, {})
    assert space.num_free_blocks == 0
    with pytest.raises(OutOfBlocksError):
        space.swap_out({3: back[1]}, pool)
    space.check()
    space.end_step()
    assert space.num_free_blocks == 4
    space.check()


def test_columns_that_left_the_window_stay_empty(pool: BlockPool) -> None:
    table = BlockTable(pool, 4)
    table.append(14)
    table.drop_before(8)
    space = SwapSpace(4)
    assert len(swapped_out(space, {1: table}, pool)) == 2
    back, copies = space.swap_in([1], pool, {})
    assert back[1].blocks[:2] == [NULL_BLOCK, NULL_BLOCK]
    assert len(copies) == 2
    back[1].check()
    with pytest.raises(IndexError, match="sliding window"):
        back[1].locate(3)


def test_one_of_a_group_may_end_outside(pool: BlockPool, group: dict[int, BlockTable]) -> None:
    space = SwapSpace(6)
    swapped_out(space, group, pool)
    space.free(1)
    assert space.num_free_blocks == 3
    space.check()
    back, copies = space.swap_in([2], pool, {})
    assert (len(copies), back[2].num_tokens) == (3, 11)


def test_distinct_blocks_are_in_the_order_of_columns(group: dict[int, BlockTable]) -> None:
    assert distinct_blocks(group.values(), 8).tolist() == [0, 1, 2, 3]


def test_check_finds_a_lost_block(pool: BlockPool, group: dict[int, BlockTable]) -> None:
    space = SwapSpace(6)
    space.swap_out(group, pool)
    space._pool.share(0)
    with pytest.raises(AssertionError, match="but held"):
        space.check()
