"""Exact tree of full blocks: the block of a run of tokens behind its prefix in a scope, matches, and eviction order.

A node is one block of tokens below its parent, and it is named by the block that holds their keys and values. A root is
a scope: whatever else changes keys and values, or must keep them apart. Keys hold the tokens themselves, so there is
no hash that could collide. The block of a pending node is being computed in the step under way.

Siblings are linked in a list, the youngest first. Nodes live in arrays by block: a tree of a million nodes is no work
for the garbage collector. Invariant after every call: the parent of every node is a node or a root.

A cached block with cached children must not be evicted before them. Without a sliding window the children are released
before their parent, so the order of release is enough. With one, blocks leave the window from the root on. Such a
block is set aside when its turn comes, and comes back to the front when its last cached child is evicted or used
again: each release moves a block at most twice, so an eviction takes constant time, amortized over the releases.
"""

import sys
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from struct import Struct
from typing import NamedTuple

import numpy as np

from quire.cache.block_pool import CachedBlocks, in_slices, run_to_the_end
from quire.core.token_ids import TOKEN_BYTES

Scope = Hashable

NONE = -1   # no block


@dataclass(slots=True)
class Path:
    """One sequence's way through the tree."""

    token_ids: Sequence[int]    # all known ones; grows in the hands of the sequence's owner
    scope: Scope
    num_blocks: int = 0         # leading columns of its table that are in the tree
    keeps_all: bool = False     # no block is given up when it leaves the sliding window: it will be pinned
    swap_in_pending: bool = False   # the step under way swaps its blocks in: they can be found when that is over
    pending: tuple[int, int] | None = None  # column and block of the first node that the step computes for it


class Awaited(NamedTuple):
    """The sequence, by its path, that computes what a pending match waits for.

    Both have the same first `num_tokens` tokens; the match was asked for up to `stop` of them.
    """

    path: Path
    num_tokens: int
    stop: int


class PrefixMatch(NamedTuple):
    """The cached tokens of a sequence that has not started. Valid until blocks are next allocated or freed.

    `num_tokens` need not be computed: those of `blocks`, all full, then the first `num_inside` of `source`, a block
    that is copied. The last token that was asked for is never among them, even if its block is. `num_in_use`: how
    many of `blocks` have an owner, so that one more costs nothing. `awaited`: the sequence that computes the block
    after these in this step, if there is one. `num_stateless`: blocks behind these that are there, but without a state
    of the sequence. `awaits_state`: a running sequence is to leave one there. `num_known`: how many of all that are
    there were found in a table.
    """

    blocks: Sequence[int] = ()
    num_tokens: int = 0
    source: int = NONE
    num_inside: int = 0
    num_in_use: int = 0
    awaited: Awaited | None = None
    num_known: int = 0
    num_stateless: int = 0
    awaits_state: bool = False

    @property
    def is_pending(self) -> bool:
        """The block after these is being computed in this step, or a state behind these by a later one."""
        return self.awaited is not None or self.awaits_state

    def of_whole_blocks(self) -> "PrefixMatch":
        """Return the match without what would have to be copied."""
        if self.source == NONE:
            return self
        return self._replace(num_tokens=self.num_tokens - self.num_inside, source=NONE, num_inside=0)


NO_MATCH = PrefixMatch()


MAX_CHILDREN_SEEN = 8  # children of one node, when a match ends inside of a block
_TOKEN_BITS = 8 * TOKEN_BYTES
_PARENT_BYTES = 8
_pack_parent = Struct("=q").pack


class PrefixTree:
    """Nodes of `block_size` tokens each; at most one for each of `num_blocks` blocks."""

    __slots__ = (
        "_blocks", "_keys", "_new_roots", "_older", "_parents", "_roots", "_scopes", "_younger", "_youngest",
        "block_size", "pending",
    )  # fmt: skip

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pending: set[int] = set()                          # nodes that cannot be used yet
        self._blocks: dict[bytes, int] = {}                     # key: `PrefixTree.key`
        self._keys: list[bytes | None] = [None] * num_blocks    # index: block, as in the next three; None: no node
        self._parents = [NONE] * num_blocks
        self._older = [NONE] * num_blocks                       # the next sibling
        self._younger = [NONE] * num_blocks
        self._youngest: dict[int, int] = {}                     # child of each node and root that has children
        self._roots: dict[Scope, int] = {}                      # ids above those of the blocks, never used again
        self._scopes: dict[int, Scope] = {}                     # key: root
        self._new_roots = count(num_blocks)

    def __contains__(self, block: int) -> bool:
        """Return whether a block is a node, pending or not."""
        return self._keys[block] is not None

    def __len__(self) -> int:
        """Count the nodes."""
        return len(self._blocks)

    def root(self, scope: Scope) -> int | None:
        """Return the root of a scope, None if the scope has no node."""
        return self._roots.get(scope)

    def open_root(self, scope: Scope) -> int:
        """Return the root of a scope, a new one if there is none. It stands until its last child has gone."""
        root = self._roots.get(scope)
        if root is None:
            root = self._roots[scope] = next(self._new_roots)
            self._scopes[root] = scope
        return root

    def key(self, parent: int, token_ids: Sequence[int]) -> bytes:
        """Return the name of the node that has these `block_size` tokens below `parent`, whether it is there or not."""
        return _pack_parent(parent) + as_bytes(token_ids)

    def key_at(self, parent: int, packed: bytes, index: int) -> bytes:
        """Return the name of the node below `parent` that has the tokens of block `index` of `packed`: `as_bytes`."""
        num_bytes = self.block_size * TOKEN_BYTES
        return _pack_parent(parent) + packed[index * num_bytes : (index + 1) * num_bytes]

    def find(self, key: bytes) -> int | None:
        """Return the node of this name, pending or not, or None."""
        return self._blocks.get(key)

    def insert(self, parent: int, key: bytes, block: int) -> None:
        """Make `block` the node `key`, the youngest child of `parent`."""
        assert self._keys[block] is None, f"block {block} is in the tree already"
        assert key not in self._blocks, f"a second block {block} for the node {self._blocks[key]}"
        self._blocks[key] = block
        self._keys[block] = key
        self._parents[block] = parent
        sibling = self._youngest.get(parent, NONE)
        if sibling != NONE:
            self._older[block] = sibling
            self._younger[sibling] = block
        self._youngest[parent] = block

    def remove(self, block: int) -> None:
        """Take a leaf out of the tree."""
        key = self._keys[block]
        assert key is not None, f"block {block} is not in the tree"
        assert block not in self._youngest, f"block {block} has children"
        del self._blocks[key]
        self._keys[block] = None
        self.pending.discard(block)
        self._unlink(block)

    def remove_all_below(self, block: int) -> list[int]:
        """Take a node and all its descendants out of the tree; return them, the node itself last."""
        path, removed = [block], list[int]()
        while path:
            child = self._youngest.get(path[-1])
            if child is None:
                self.remove(path[-1])
                removed.append(path.pop())
            else:
                path.append(child)
        return removed

    def has_children(self, parent: int) -> bool:
        """Return whether a node or root has children."""
        return parent in self._youngest

    def parent(self, block: int) -> int:
        """Return the parent of a node: a node, or a root, with an id above those of all blocks."""
        return self._parents[block]

    def children(self, parent: int) -> Iterator[int]:
        """Yield the children of a node or root, the youngest first."""
        child = self._youngest.get(parent, NONE)
        while child != NONE:
            yield child
            child = self._older[child]

    def walk(
        self, scope: Scope, token_ids: Sequence[int], stop: int, known: Sequence[int] = ()
    ) -> Iterator[int]:
        """Yield the nodes that hold token_ids[:stop] block by block, pending ones too, as far as blocks are full.

        `known`: the first of them, which are not yielded.
        """
        node, num_bytes = known[-1] if known else self._roots.get(scope), self.block_size * TOKEN_BYTES
        if node is None:
            return
        packed = as_bytes(token_ids[len(known) * self.block_size : stop])
        for start in range(0, len(packed) - num_bytes + 1, num_bytes):
            node = self._blocks.get(_pack_parent(node) + packed[start : start + num_bytes])
            if node is None:
                return
            yield node

    def longest_match_inside(self, parent: int, token_ids: Sequence[int]) -> tuple[int, int]:
        """Return (child, number of its first tokens that `token_ids` begins with), of the child with the most.

        Looks at the youngest children only, and at none that is pending. (NONE, 0) if no child has any.
        """
        wanted, best, most = as_bytes(token_ids), NONE, 0
        for child in islice(self.children(parent), MAX_CHILDREN_SEEN):
            num_equal = 0 if child in self.pending else num_equal_tokens(wanted, self._tokens(child))
            if num_equal > most:
                best, most = child, num_equal
        return best, most

    def _tokens(self, block: int) -> bytes:
        key = self._keys[block]
        assert key is not None, f"block {block} is not in the tree"
        return key[_PARENT_BYTES:]

    def _unlink(self, block: int) -> None:
        """Take a node out of its parent's list; a root without children goes."""
        parent, older, younger = self._parents[block], self._older[block], self._younger[block]
        if older != NONE:
            self._younger[older] = younger
        if younger != NONE:
            self._older[younger] = older
        elif older != NONE:
            self._youngest[parent] = older
        else:
            del self._youngest[parent]
            if parent in self._scopes:
                del self._roots[self._scopes.pop(parent)]
        self._parents[block] = self._older[block] = self._younger[block] = NONE

    def check(self) -> None:
        """Assert that keys, links and roots agree and that every parent is there."""
        run_to_the_end(self.checking())

    def checking(self) -> Iterator[None]:
        """Check in slices."""
        num_nodes, keys = 0, self._keys
        for blocks in in_slices(range(len(keys))):
            nodes = [block for block in blocks if keys[block] is not None]
            num_nodes += len(nodes)
            for block in nodes:
                self._check_node(block)
            yield
        assert num_nodes == len(self._blocks), f"{num_nodes} nodes, {len(self._blocks)} keys"
        num_listed = np.zeros(len(keys), dtype=np.int32)
        for listed in in_slices(child for parent in self._youngest for child in self.children(parent)):
            np.add.at(num_listed, listed, 1)
            yield
        for blocks in in_slices(range(len(keys))):
            wrong = [block for block in blocks if num_listed[block] != (keys[block] is not None)]
            assert not wrong, f"blocks {wrong} are listed as children {num_listed[wrong]} times"
            yield
        assert {root: scope for scope, root in self._roots.items()} == self._scopes, "scopes and roots disagree"
        assert self._scopes.keys() <= self._youngest.keys(), "a root without children"
        assert all(keys[block] is not None for block in self.pending), "a pending block is not in the tree"

    def _check_node(self, block: int) -> None:
        key, parent = self._keys[block], self._parents[block]
        assert key is not None
        assert self._blocks[key] == block, f"the key of {block} leads to {self._blocks[key]}"
        assert int.from_bytes(key[:_PARENT_BYTES], sys.byteorder) == parent, f"{block} is not below {parent}"
        assert parent in self._scopes or self._keys[parent] is not None, f"{block} has lost its parent {parent}"


def as_bytes(token_ids: Sequence[int]) -> bytes:
    """Return a run of tokens as it stands in a key."""
    return array("i", token_ids).tobytes()


def num_equal_tokens(left: bytes, right: bytes) -> int:
    """Return how many tokens two runs have in common at their beginnings. No loop over tokens."""
    num_bytes = min(len(left), len(right))
    differing = int.from_bytes(left[:num_bytes], "little") ^ int.from_bytes(right[:num_bytes], "little")
    if differing == 0:
        return num_bytes * 8 // _TOKEN_BITS
    return ((differing & -differing).bit_length() - 1) // _TOKEN_BITS


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


def scope_text(scope: Scope) -> bytes:
    """Return a scope as bytes, different ones for different scopes: each part with a mark and its length."""
    parts = scope if isinstance(scope, tuple) else (scope,)
    texts = [b"-" if part is None else b"+%d:" % len(text := str(part).encode()) + text for part in parts]
    return b"".join(texts)
