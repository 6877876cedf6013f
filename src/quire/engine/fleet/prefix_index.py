"""Index of the prefixes that an engine has in its cache, kept by the server: what was routed there, less evictions.

Full blocks of tokens in the engine's own tree (`PrefixTree`), so that a match is exact to the token and never crosses a
scope. The index has as many nodes as the engine has blocks, and evicts as the engine does: leaves first, of those the
least recently used. An engine reports how many blocks it has evicted, not which, so the index is an estimate.
"""

from collections import OrderedDict
from collections.abc import Sequence

from quire.cache.prefix_match import Scope
from quire.cache.prefix_tree import PrefixTree, as_bytes


class PrefixIndex:
    """Prefixes of one engine, in blocks of `block_size` tokens, at most `num_blocks`.

    A sequence uses all nodes of its path, so a node is used at least as recently as its children, and the order of the
    last uses, children first, is the order of eviction.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._tree = PrefixTree(num_blocks, block_size)
        self._order = OrderedDict[int, None]()  # all nodes, the least recently used first
        self._free = list(range(num_blocks))
        self._num_evicted = 0

    def __len__(self) -> int:
        """Count the blocks in the index."""
        return len(self._tree)

    def match(self, scope: Scope, token_ids: Sequence[int]) -> int:
        """Return how many of the first tokens the engine has in its cache, in full blocks. Changes nothing."""
        return self._block_size * len(self.find(scope, token_ids))

    def find(self, scope: Scope, token_ids: Sequence[int]) -> list[int]:
        """Return the blocks of what `match` counts."""
        return list(self._tree.walk(scope, token_ids, len(token_ids)))

    def add(self, scope: Scope, token_ids: Sequence[int], path: list[int] | None = None) -> None:
        """Add the full blocks of a sequence that the engine computes, as the most recently used.

        `path`: what `find` returns of it, if that is known; it may be extended.
        """
        path = self.find(scope, token_ids) if path is None else path
        self._use(path)
        if len(path) < len(token_ids) // self._block_size:
            self._extend(path, scope, token_ids)

    def _use(self, path: Sequence[int]) -> None:
        for block in reversed(path):             # the last block of a sequence is evicted before the first
            self._order.move_to_end(block)

    def _extend(self, path: list[int], scope: Scope, token_ids: Sequence[int]) -> None:
        """Add the blocks behind a path that has just been used, as far as there is room without evicting the path."""
        tree, packed, num_found = self._tree, as_bytes(token_ids), len(path)
        num_missing = len(token_ids) // self._block_size - num_found
        while len(self._free) < num_missing and len(self._order) > num_found:
            self._evict_one()
        for index in range(num_found, num_found + min(num_missing, len(self._free))):
            node = path[-1] if path else tree.open_root(scope)
            tree.insert(node, tree.key_at(node, packed, index), block := self._free.pop())
            path.append(block)
        self._order.update(dict.fromkeys(reversed(path[num_found:])))
        self._use(path[:num_found])

    def evict(self, num_evicted: int) -> None:
        """Evict until the index has evicted as many blocks as the engine has since its start: `num_evicted`.

        What the index had to evict for want of room counts: the engine evicts for the same requests, later.
        """
        while self._num_evicted < num_evicted and self._order:
            self._evict_one()
        self._num_evicted = max(self._num_evicted, num_evicted)

    def _evict_one(self) -> None:
        """Evict the least recently used node, a leaf."""
        block, _ = self._order.popitem(last=False)
        self._tree.remove(block)
        self._free.append(block)
        self._num_evicted += 1

    def check(self) -> None:
        """Assert that each block is either free or a node, and that children are evicted before their parents."""
        self._tree.check()
        held = sorted([*self._order, *self._free])
        assert held == list(range(len(held))), "a block is free and a node, or neither"
        assert len(self._tree) == len(self._order), f"{len(self._tree)} nodes, {len(self._order)} in the order"
        places = {block: place for place, block in enumerate(self._order)}
        late = [block for block in places if places.get(self._tree.parent(block), len(places)) < places[block]]
        assert not late, f"nodes {late} are evicted after their parents"
