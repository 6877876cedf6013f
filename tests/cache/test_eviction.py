"""EvictionQueue: the least recently used leaf goes first, and finding it takes constant time."""

import pytest

from quire.cache.prefix_tree import EvictionQueue, PrefixTree
from quire.core.config import CacheConfig
from quire.scheduling.scheduler import make_cache
from support.counted_calls import CountedCalls


def tree_of(*parents: int | None) -> PrefixTree:
    """A tree in which parents[b] is the parent of block b, None the root."""
    tree = PrefixTree(len(parents), 1)
    for block, parent in enumerate(parents):
        above = tree.open_root(None) if parent is None else parent
        tree.insert(above, tree.key(above, [block]), block)
    return tree


def queue_of(tree: PrefixTree, *released: int) -> EvictionQueue:
    """Cached blocks, in the order of release."""
    queue = EvictionQueue(tree, 8)
    for block in released:
        assert queue.try_add(block)
    queue.check()
    return queue


def evict_all(queue: EvictionQueue) -> list[int]:
    evicted = []
    while len(queue):
        evicted += queue.evict()
        queue.check()
    return evicted


def test_block_released_first_goes_first() -> None:
    queue = queue_of(tree_of(None, None, None), 1, 0, 2)
    assert (len(queue), 1 in queue, 3 in queue) == (3, True, False)
    assert evict_all(queue) == [1, 0, 2]


def test_block_used_again_goes_last() -> None:
    queue = queue_of(tree_of(None, None, None), 1, 0, 2)
    queue.remove(1)
    assert 1 not in queue
    assert queue.try_add(1)
    assert evict_all(queue) == [0, 2, 1]


def test_what_is_not_in_the_tree_is_not_cached() -> None:
    tree = tree_of(None, None)
    tree.remove(1)
    assert not EvictionQueue(tree, 2).try_add(1)


def test_chain_released_from_its_root_goes_from_its_leaf() -> None:
    assert evict_all(queue_of(tree_of(None, 0, 1, 2), 0, 1, 2, 3)) == [3, 2, 1, 0]


def test_of_two_chains_the_least_recently_used_leaf_goes_first() -> None:
    queue = queue_of(tree_of(None, 0, None, 2, None), 0, 2, 3, 4, 1)
    assert evict_all(queue) == [3, 2, 4, 1, 0]


def test_parent_comes_back_to_the_front_when_its_child_is_used_again() -> None:
    queue = queue_of(tree_of(None, 0, None), 0, 1, 2)
    assert queue.evict() == [1]
    queue = queue_of(tree_of(None, 0, None, 0), 0, 2, 1, 3)
    assert queue.evict() == [2], "0 has cached children"
    for child in (1, 3):
        queue.remove(child)
        queue.check()
    assert queue.evict() == [0]


def test_parent_of_a_block_in_use_takes_all_below_it_out_of_the_tree() -> None:
    tree = tree_of(None, 0, 1, 2)
    queue = queue_of(tree, 0, 3)    # 1 and 2 have owners
    assert queue.evict() == [3, 0]
    assert (len(tree), len(queue)) == (0, 0)
    queue.check()


def test_check_finds_a_child_that_was_not_counted() -> None:
    queue = queue_of(tree_of(None, 0), 0, 1)
    queue._num_children[0] = 0
    with pytest.raises(AssertionError, match="0 cached children of 0 were counted"):
        queue.check()


def test_check_finds_a_block_set_aside_for_nothing() -> None:
    queue = queue_of(tree_of(None, 0), 0)
    queue._set_aside.add(queue._order.popitem()[0])
    with pytest.raises(AssertionError, match="without a cached child"):
        queue.check()


@pytest.mark.parametrize("window", [None, 64])
def test_work_of_evicting_does_not_grow_with_the_length_of_the_chain(window: int | None) -> None:
    def num_calls(num_cached: int, num_taken: int = 64) -> float:
        cache = make_cache(CacheConfig(num_cached + 1, 4, window))
        cache.create(0, list(range(4 * num_cached)))
        for _ in range(0, num_cached, 32):
            cache.publish()
            cache.append(0, 128)
            cache.end_step()
        cache.free(0, 4 * num_cached)
        cache.create(1, [9] * 4 * num_cached)
        cache.append(1, 8)                      # a block never used, and the first eviction
        cache.end_step()
        with CountedCalls() as calls:
            for _ in range(num_taken):
                cache.append(1, 4)
                cache.end_step()
        assert cache.stats().evicted_blocks == num_taken + 1
        return calls.count

    assert num_calls(1024) == num_calls(128)


def test_work_of_evicting_a_whole_chain_is_linear() -> None:
    def num_calls(length: int) -> int:
        queue = queue_of_chain(length)
        with CountedCalls() as calls:
            while len(queue):
                queue.evict()
        return calls.count

    def queue_of_chain(length: int) -> EvictionQueue:
        queue = EvictionQueue(tree_of(None, *range(length - 1)), length)
        assert all(queue.try_add(block) for block in range(length))
        return queue

    assert num_calls(2000) <= 2 * num_calls(1000) + 100
