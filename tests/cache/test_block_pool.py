"""BlockPool: order of allocation, owners, and errors that change nothing."""

import pytest

from quire.cache.block_pool import BlockPool, OutOfBlocksError
from quire.core.errors import EngineError


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_pool_without_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"num_blocks must be at least 1, got {num_blocks}"):
        BlockPool(num_blocks)


def test_new_pool_is_free_altogether() -> None:
    pool = BlockPool(3)
    assert (pool.num_blocks, pool.num_free_blocks) == (3, 3)
    assert [pool.ref_count(block) for block in range(3)] == [0, 0, 0]
    pool.check()


def test_never_used_blocks_come_in_ascending_order() -> None:
    pool = BlockPool(5)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(3) == [2, 3, 4]
    assert pool.num_free_blocks == 0
    pool.check()


def test_freed_blocks_come_before_never_used_ones_the_last_freed_first() -> None:
    pool = BlockPool(6)
    pool.allocate(4)
    for block in (2, 0, 3):
        pool.release(block)
    assert pool.allocate(5) == [3, 0, 2, 4, 5]
    pool.check()


def test_freed_blocks_are_enough_for_a_small_call() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    pool.release(0)
    pool.release(1)
    assert pool.allocate(1) == [1]
    assert pool.allocate(1) == [0]
    assert pool.allocate(1) == [3]
    pool.check()


def test_allocating_nothing_takes_nothing() -> None:
    pool = BlockPool(1)
    assert pool.allocate(0) == []
    assert pool.num_free_blocks == 1
    pool.allocate(1)
    assert pool.allocate(0) == []


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    pool.release(0)
    with pytest.raises(OutOfBlocksError, match="need 4 blocks, 3 of 4 are free"):
        pool.allocate(4)
    assert pool.num_free_blocks == 3
    assert [pool.ref_count(block) for block in range(4)] == [0, 1, 0, 0]
    pool.check()
    assert pool.allocate(3) == [0, 2, 3]


def test_out_of_blocks_is_an_engine_error() -> None:
    assert issubclass(OutOfBlocksError, EngineError)


def test_block_is_free_when_its_last_owner_lets_go() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.share(block)
    assert pool.ref_count(block) == 3
    for owners_left in (2, 1):
        pool.release(block)
        assert pool.ref_count(block) == owners_left
        assert pool.num_free_blocks == 1
        pool.check()
    pool.release(block)
    assert pool.num_free_blocks == 2
    pool.check()


def test_block_handed_out_again_has_one_owner() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.release(block)
    pool.release(block)
    assert pool.allocate(1) == [block]
    assert pool.ref_count(block) == 1


def test_releasing_a_free_block_is_a_fault() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool.release(0)
    for block in (0, 1):
        with pytest.raises(AssertionError, match=f"block {block} freed twice"):
            pool.release(block)
    pool.check()


def test_sharing_a_free_block_is_a_fault() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="block 0 is free"):
        pool.share(0)
    pool.check()


@pytest.mark.parametrize("block", [-1, 2])
def test_block_outside_of_the_pool_is_a_fault(block: int) -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    for verb in (pool.ref_count, pool.share, pool.release):
        with pytest.raises(AssertionError, match=f"no block {block} in a pool of 2"):
            verb(block)
    assert [pool.ref_count(b) for b in range(2)] == [1, 1]


def test_negative_allocation_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="cannot allocate -1 blocks"):
        BlockPool(2).allocate(-1)


def test_blocks_are_counted_by_number_of_owners() -> None:
    pool = BlockPool(5)
    pool.allocate(3)
    pool.share(1)
    assert pool.count_blocks_by_owners() == {0: 2, 1: 2, 2: 1}


def test_check_finds_a_block_that_is_listed_twice() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    pool.release(0)
    pool._freed.append(0)
    with pytest.raises(AssertionError, match="free list"):
        pool.check()


def test_check_finds_a_leaked_block() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    pool._ref_counts[1] = 0
    with pytest.raises(AssertionError, match="free list"):
        pool.check()


def test_check_finds_a_negative_count() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    pool._ref_counts[1] = -1
    with pytest.raises(AssertionError, match="negative"):
        pool.check()
