"""Eviction order of cached blocks: leaves of the prefix tree first, of those the least recently used.

A cached block with cached children must not be evicted before them. Without a sliding window the children are released
before their parent, so the order of release is enough. With one, blocks leave the window from the root on. Such a
block is set aside when its turn comes, and comes back to the front when its last cached child is evicted or used
again: each release moves a block at most twice, so an eviction takes constant time, amortized over the releases.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from quire.cache.block_pool import CachedBlocks, in_slices, run_to_the_end
from quire.cache.prefix_tree import PrefixTree


class EvictionQueue(CachedBlocks):
    """The cached blocks of a pool: nodes of a tree without an owner."""

    __slots__ = ("_num_children", "_order", "_set_aside", "_tree")

    def __init__(self, tree: PrefixTree, num_blocks: int) -> None:
        self._tree = tree
        self._order = OrderedDict[int, None]()  # the least recently used first
        self._set_aside = set[int]()            # with cached children; used less recently than all in the order
        self._num_children = array("i", bytes(4 * num_blocks))  # cached ones of each node

    def can_be_found(self, block: int) -> bool:
        """Return whether a block, with owners or without, is in the tree."""
        return block in self._tree

    def __contains__(self, block: int) -> bool:
        """Return whether a block is cached."""
        return block in self._order or block in self._set_aside

    def __iter__(self) -> Iterator[int]:
        """Yield the cached blocks, the least recently used first but for those set aside, which come before."""
        return chain(self._set_aside, self._order)

    def __len__(self) -> int:
        """Count the cached blocks."""
        return len(self._order) + len(self._set_aside)

    def try_add(self, block: int) -> bool:
        """Cache a block that its last owner has released, the last to be evicted; False if it is not in the tree."""
        tree = self._tree
        if block not in tree:
            return False
        self._order[block] = None
        if (parent := tree.parent(block)) < len(self._num_children):    # else a root
            self._num_children[parent] += 1
        return True

    def remove(self, block: int) -> None:
        """Take out a block that has an owner again."""
        if block in self._order:
            del self._order[block]
        else:
            self._set_aside.remove(block)
        self._uncount(block)

    def evict(self) -> list[int]:
        """Evict the next block; return it behind the other cached blocks, if any, that left the tree with it.

        A child may have owners although its parent has none, where sequences let go of what has left their sliding
        window. What is below stays with its owners, but cannot be found without its parent, so it leaves the tree.
        """
        tree, (block, _) = self._tree, self._order.popitem(last=False)
        while self._num_children[block]:
            self._set_aside.add(block)
            block, _ = self._order.popitem(last=False)
        self._uncount(block)
        if not tree.has_children(block):
            tree.remove(block)
            return [block]
        evicted = []
        for each in tree.remove_all_below(block):
            self._num_children[each] = 0
            if each in self:
                self._order.pop(each, None)
                self._set_aside.discard(each)
                evicted.append(each)
        return [*evicted, block]

    def _uncount(self, block: int) -> None:
        """Count a block no more as a cached child; it is still in the tree."""
        parent = self._tree.parent(block)
        if parent >= len(self._num_children):                           # a root
            return
        self._num_children[parent] -= 1
        if parent in self._set_aside and not self._num_children[parent]:
            self._set_aside.remove(parent)
            self._order[parent] = None
            self._order.move_to_end(parent, last=False)

    def check(self) -> None:
        """Assert that cached children are counted, and that only blocks that have some are set aside."""
        run_to_the_end(self.checking())

    def checking(self, ref_counts: Sequence[int] = ()) -> Iterator[None]:
        """Check in slices. `ref_counts`, of each block: none without an owner is in the tree but these."""
        tree, counted = self._tree, np.zeros(len(self._num_children), dtype=np.int32)
        for blocks in in_slices(self):
            gone = [block for block in blocks if block not in tree]
            assert not gone, f"cached blocks {gone} have left the tree"
            parents = np.array([tree.parent(block) for block in blocks])
            np.add.at(counted, parents[parents < len(counted)], 1)
            yield
        assert self._order.keys().isdisjoint(self._set_aside), "a cached block that is listed twice"
        for block in np.flatnonzero(np.frombuffer(self._num_children, dtype=np.int32) != counted).tolist():
            raise AssertionError(f"{self._num_children[block]} cached children of {block} were counted")
        without = [block for block in self._set_aside if not self._num_children[block]]
        assert not without, f"blocks {without} were set aside without a cached child"
        for blocks in in_slices(range(len(ref_counts))):
            missed = [block for block in blocks if not ref_counts[block] and block in tree and block not in self]
            assert not missed, f"blocks {missed} are in the tree without an owner, but not cached"
            yield
