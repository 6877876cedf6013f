"""Index of the prefixes that an engine has in its cache, kept by the server: what was routed there, less evictions.

Full blocks of tokens in the engine's own tree (`PrefixTree`), so that a match is exact to the token and never crosses a
scope. The index has as many nodes as the engine has blocks, and evicts as the engine does: leaves first, of those the
least recently used. An engine reports how many blocks it has evicted, not which, so the index is an estimate.
"""

from collections.abc import Sequence

from quire.cache.prefix_cache.eviction import EvictionQueue
from quire.cache.prefix_cache.tree import PrefixTree, as_bytes
from quire.cache.prefix_match import Scope


class PrefixIndex:
    """Prefixes of one engine, in blocks of `block_size` tokens, at most `num_blocks`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._tree = PrefixTree(num_blocks, block_size)
        self._unused = EvictionQueue(self._tree, num_blocks)  # all nodes, the least recently used first
        self._free = list(range(num_blocks))
        self._num_evicted = 0

    def __len__(self) -> int:
        """Count the blocks in the index."""
        return len(self._tree)

    def match(self, scope: Scope, token_ids: Sequence[int]) -> int:
        """Return how many of the first tokens the engine has in its cache, in full blocks. Changes nothing."""
        return self._block_size * sum(1 for _ in self._tree.walk(scope, token_ids, len(token_ids)))

    def add(self, scope: Scope, token_ids: Sequence[int]) -> None:
        """Add the full blocks of a sequence that the engine computes, as the most recently used."""
        tree = self._tree
        path = list(tree.walk(scope, token_ids, len(token_ids)))
        for block in path:                       # off the queue, so that none of them is evicted for the rest
            self._unused.remove(block)
        packed = as_bytes(token_ids)
        for index in range(len(path), len(token_ids) // self._block_size):
            if not self._free and not self._evict_one():
                break
            node = path[-1] if path else tree.open_root(scope)
            tree.insert(node, tree.key_at(node, packed, index), block := self._free.pop())
            path.append(block)
        for block in reversed(path):             # the last block of a sequence is evicted before the first
            self._unused.try_add(block)

    def evict(self, num_evicted: int) -> None:
        """Evict until the index has evicted as many blocks as the engine has since its start: `num_evicted`.

        What the index had to evict for want of room counts: the engine evicts for the same requests, later.
        """
        while self._num_evicted < num_evicted and self._evict_one():
            pass
        self._num_evicted = max(self._num_evicted, num_evicted)

    def _evict_one(self) -> bool:
        """Evict the least recently used leaf; False if there is none."""
        if not len(self._unused):
            return False
        evicted = self._unused.evict()
        self._free += evicted
        self._num_evicted += len(evicted)
        return True

    def check(self) -> None:
        """Assert that each block is either a node in the queue, or free."""
        self._tree.check()
        self._unused.check()
        held = sorted([*self._unused, *self._free])
        assert held == list(range(len(held))), "a block is free and a node, or neither"
        assert len(self._tree) == len(self._unused), f"{len(self._tree)} nodes, {len(self._unused)} in the queue"
