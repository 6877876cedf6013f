"""BlockPool: order of allocation, owners, and errors that change nothing."""

import numpy as np
import pytest

from quire.cache.block_pool import BlockPool, OutOfBlocksError
from quire.cache.prefix_tree import EvictionQueue, PrefixTree
from quire.core.errors import EngineError


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_pool_without_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"num_blocks must be at least 1, got {num_blocks}"):
        BlockPool(num_blocks)


def test_pool_that_may_be_empty_has_nothing_to_give() -> None:
    pool = BlockPool(0, may_be_empty=True)
    assert pool.num_free_blocks == 0
    with pytest.raises(OutOfBlocksError, match="need 1 blocks, 0 of 0 are free"):
        pool.allocate(1)
    with pytest.raises(ValueError, match="num_blocks must be at least 0, got -1"):
        BlockPool(-1, may_be_empty=True)


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


class TestCachedBlocks:
    """A pool over a tree: 5 blocks, of which 0, 1, 2 are a path and 3 is a second child of 0."""

    @pytest.fixture
    def tree(self) -> PrefixTree:
        return PrefixTree(num_blocks=5, block_size=1)

    @pytest.fixture
    def pool(self, tree: PrefixTree) -> BlockPool:
        pool = BlockPool(5, EvictionQueue(tree, 5))
        pool.allocate(4)
        for parent, block in ((tree.open_root(None), 0), (0, 1), (1, 2), (0, 3)):
            tree.insert(parent, tree.key(parent, [block]), block)
        return pool

    def release(self, pool: BlockPool, *blocks: int) -> None:
        for block in blocks:
            pool.release(block)
        pool.check()

    def test_block_in_the_tree_is_kept_when_its_last_owner_goes(self, pool: BlockPool) -> None:
        self.release(pool, 2, 3)
        assert (pool.num_free_blocks, pool.num_cached_blocks) == (3, 2)
        assert [pool.ref_count(block) for block in range(5)] == [1, 1, 0, 0, 0]
        assert pool.count_blocks_by_owners() == {0: 3, 1: 2}

    def test_cached_block_finds_an_owner_again(self, pool: BlockPool) -> None:
        self.release(pool, 2)
        pool.share(2)
        assert (pool.ref_count(2), pool.num_cached_blocks, pool.num_free_blocks) == (1, 0, 1)
        pool.check()

    def test_free_blocks_are_handed_out_before_cached_ones(self, pool: BlockPool, tree: PrefixTree) -> None:
        tree.remove(3)
        self.release(pool, 2, 3)
        assert pool.allocate(3) == [3, 4, 2]
        assert (pool.num_evicted, 2 in tree, pool.num_cached_blocks) == (1, False, 0)
        pool.check()

    def test_least_recently_used_goes_first(self, pool: BlockPool) -> None:
        pool.allocate(1)
        self.release(pool, 3, 2, 1, 0)
        assert pool.allocate(2) == [3, 2]
        pool.check()
        assert pool.allocate(2) == [1, 0]
        assert pool.num_evicted == 4

    def test_leaves_go_before_their_parents_whoever_came_first(self, pool: BlockPool, tree: PrefixTree) -> None:
        pool.allocate(1)
        self.release(pool, 0, 1, 2, 3)
        given_up = pool.allocate(4)
        assert given_up.index(2) < given_up.index(1) < given_up.index(0)
        assert given_up.index(3) < given_up.index(0)
        assert len(tree) == 0
        pool.check()

    def test_parent_in_vain_takes_what_is_below_out_of_the_tree(self, pool: BlockPool, tree: PrefixTree) -> None:
        """The path's owner has let go of block 0, out of its sliding window, and 2 is cached below 1, in use."""
        pool.allocate(1)
        self.release(pool, 0)
        tree.remove(3)
        tree.check()
        self.release(pool, 2)
        assert pool.allocate(1) == [0]
        assert (len(tree), pool.ref_count(1), pool.num_free_blocks, pool.num_cached_blocks) == (0, 1, 1, 0)
        pool.check()
        self.release(pool, 1)
        assert pool.num_cached_blocks == 0, "what cannot be found is not kept"

    def test_what_goes_with_a_parent_in_vain_can_be_taken_by_the_same_call(self, pool: BlockPool) -> None:
        pool.allocate(1)
        self.release(pool, 0, 2)
        self.release(pool, 3)
        assert sorted(pool.allocate(3)) == [0, 2, 3]
        pool.check()

    def test_all_or_nothing_counts_cached_blocks(self, pool: BlockPool, tree: PrefixTree) -> None:
        self.release(pool, 2)
        with pytest.raises(OutOfBlocksError, match="need 3 blocks, 2 of 5 are free"):
            pool.allocate(3)
        assert (2 in tree, pool.num_evicted) == (True, 0)
        assert pool.allocate(2) == [4, 2]

    def test_free_block_cannot_be_shared_although_cached_ones_can(self, pool: BlockPool) -> None:
        with pytest.raises(AssertionError, match="block 4 is free"):
            pool.share(4)

    def test_check_finds_a_cached_block_that_has_left_the_tree(self, pool: BlockPool, tree: PrefixTree) -> None:
        self.release(pool, 2)
        tree.remove(2)
        with pytest.raises(AssertionError, match="cached"):
            pool.check()


class TestAllAtOnce:
    """Several blocks in one call: the same as one call for each."""

    @pytest.fixture
    def pool(self) -> BlockPool:
        pool = BlockPool(6)
        pool.allocate(5)
        pool.share(3)
        return pool

    def test_each_has_one_owner_more(self, pool: BlockPool) -> None:
        pool.share_all(np.array([4, 3, 0]))
        assert [pool.ref_count(block) for block in range(6)] == [2, 1, 1, 3, 2, 0]
        assert pool.count_blocks_by_owners() == {0: 1, 1: 2, 2: 2, 3: 1}
        pool.check()

    def test_each_has_one_owner_less(self, pool: BlockPool) -> None:
        pool.release_all(np.array([4, 3, 0]))
        assert pool.ref_counts(np.arange(6)).tolist() == [0, 1, 1, 1, 0, 0]
        assert pool.count_blocks_by_owners() == {0: 3, 1: 3}
        assert pool.allocate(2) == [0, 4], "in the order in which they were given back, the last first"
        pool.check()

    def test_none_is_nothing(self, pool: BlockPool) -> None:
        pool.share_all(np.zeros(0, dtype=np.int64))
        pool.release_all(np.zeros(0, dtype=np.int64))
        pool.check()

    def test_fault_changes_nothing(self, pool: BlockPool) -> None:
        before = pool.ref_counts(np.arange(6)).tolist()
        with pytest.raises(AssertionError, match="block 5 is free and cannot be shared"):
            pool.share_all(np.array([4, 5]))
        with pytest.raises(AssertionError, match=r"blocks \[5\] freed twice"):
            pool.release_all(np.array([4, 5]))
        with pytest.raises(AssertionError, match="no block -1 in a pool of 6"):
            pool.share_all(np.array([4, -1]))
        assert pool.ref_counts(np.arange(6)).tolist() == before
        pool.check()

    def test_cached_blocks_find_owners_again(self) -> None:
        tree = PrefixTree(num_blocks=3, block_size=1)
        pool = BlockPool(3, EvictionQueue(tree, 3))
        pool.allocate(3)
        tree.insert(tree.open_root(None), tree.key(tree.open_root(None), [7]), 1)
        pool.release_all(np.array([2, 1]))
        assert (pool.num_cached_blocks, pool.num_free_blocks) == (1, 2)
        pool.share_all(np.array([0, 1]))
        assert [pool.ref_count(block) for block in range(3)] == [2, 1, 0]
        pool.check()
