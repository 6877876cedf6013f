"""PrefixCache: computed blocks, found again by sequences that start with the same tokens.

Follows each sequence with a path: how many of its blocks are in the tree. Nothing else changes a path. What a prefill
fills is in the tree at once, pending while its step runs. What decoding fills is published before a lookup, or
when the sequence ends, so that decoding by itself costs nothing here. Where the tree holds a block already, the
sequence adopts it and frees its own: equal content is stored once. A match goes on inside of the block in which it
ends: that block is copied, and only what differs is computed. What is pinned is found like all else, to its last token.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

from quire.cache.block_pool import BlockPool, in_slices
from quire.cache.block_table import NULL_BLOCK, BlockTable
from quire.cache.kv_events import TreeWithEvents
from quire.cache.measured_pool import MeasuredPool
from quire.cache.pins import Pins
from quire.cache.prefix_tree import NONE, Awaited, EvictionQueue, Path, PrefixMatch, PrefixTree, Scope, as_bytes
from quire.cache.prefixes import Prefixes
from quire.cache.states import SnapshotTree
from quire.core.config import CacheConfig
from quire.core.token_ids import num_equal_tokens


class PrefixCache(Prefixes):
    """The tree over a pool, and the paths of running sequences."""

    can_be_found = True

    def __init__(self, config: CacheConfig) -> None:
        self.events = None if config.kv_events is None else TreeWithEvents(config)
        if config.num_state_slots:
            self.snapshots = SnapshotTree(config, BlockPool(config.num_state_slots))
        trees = (self.events, self.snapshots)
        own = next((tree for tree in trees if tree is not None), None)
        self._tree = PrefixTree(config.num_blocks, config.block_size) if own is None else own
        cached = EvictionQueue(self._tree, config.num_blocks)
        self.pool = (
            MeasuredPool(config.num_blocks, cached, config.measured_share) if config.measured_share > 0
            else BlockPool(config.num_blocks, cached)
        )  # fmt: skip
        self._size = config.block_size
        self.pins = Pins(config.num_blocks, config.block_size)
        self._window, self._finds_whole_blocks = config.sliding_window, config.finds_whole_blocks
        self.num_queried = self.num_found = 0
        self._computing: dict[int, Path] = {}  # key: the first node that the step computes for each
        self._swapping_in: list[Path] = []        # sequences that the step under way swaps in

    # --- looking up -----------------------------------------------------------------------------------------------

    def match(
        self, token_ids: Sequence[int], stop: int, scope: Scope, like: BlockTable | None = None
    ) -> PrefixMatch:
        """Find what is there of token_ids[:stop]. Changes nothing. `like`: a table to compare with first."""
        tree, pool = self._tree, self.pool
        blocks = [] if like is None else self._common_blocks(like, token_ids, stop, scope)
        num_known = num_in_use = len(blocks)                # the table owns them
        for block in tree.walk(scope, token_ids, stop, blocks.copy()):
            if block in tree.pending:
                num_tokens = len(blocks) * self._size
                awaited = Awaited(self._computing[block], num_tokens + self._size, stop)
                return PrefixMatch(blocks, num_tokens, num_in_use=num_in_use, awaited=awaited, num_known=num_known)
            blocks.append(block)
            num_in_use += pool.ref_count(block) > 0
        if self.snapshots is not None:
            match = PrefixMatch(blocks, num_in_use=num_in_use, num_known=num_known)
            return self.snapshots.with_state(match, stop, pool)
        source, num_inside = self._match_inside(blocks, token_ids, stop, scope)
        num_tokens = min(len(blocks) * self._size + num_inside, stop - 1)
        return PrefixMatch(blocks, num_tokens, source, num_inside, num_in_use, num_known=num_known)

    def _common_blocks(self, table: BlockTable, token_ids: Sequence[int], stop: int, scope: Scope) -> list[int]:
        """Return the first blocks of a table that hold token_ids[:stop] and can be found; not all that there are.

        Compares memory, so it costs a fiftieth of a walk. For tables that hold all of their blocks: no window.
        """
        path = table.path
        if path is None or path.swap_in_pending or path.scope != scope:
            return []
        num_blocks = min(path.num_blocks if path.pending is None else path.pending[0], stop // self._size)
        if num_blocks == 0 or path.token_ids[: self._size] != token_ids[: self._size]:
            return []
        num_blocks = num_equal_tokens(path.token_ids, token_ids, num_blocks * self._size) // self._size
        while num_blocks and table.columns[num_blocks - 1] in self._tree.pending:  # a fork computes it now
            num_blocks -= 1
        return table.columns[:num_blocks].tolist() if num_blocks and table.columns[num_blocks - 1] in self._tree else []

    def _match_inside(
        self, blocks: list[int], token_ids: Sequence[int], stop: int, scope: Scope
    ) -> tuple[int, int]:
        """Return the block behind `blocks` with the most of the next tokens, and how many; never the last token."""
        start = len(blocks) * self._size
        parent = blocks[-1] if blocks else self._tree.root(scope)
        end = min(stop - 1, start + self._size)
        if end <= start or self._finds_whole_blocks:
            return NONE, 0
        wanted = token_ids[start:end]
        cached = (NONE, 0) if parent is None else self._tree.longest_match_inside(parent, wanted)
        pinned = self.pins.longest_match_inside(blocks[-1] if blocks else NONE, scope, wanted)
        return cached if cached[1] > pinned[1] else pinned  # if equal, what is kept anyway

    def still_awaits(self, awaited: Awaited, token_ids: Sequence[int]) -> Awaited | None:
        """Return what a match of the same tokens would wait for now, None if it has to be looked up anew.

        Compares only the tokens that the awaited sequence has computed, or is at, since `awaited` was returned.
        """
        path = awaited.path
        if path.pending is None or path.pending[1] not in self._tree.pending:
            return None
        start, stop = awaited.num_tokens, (path.pending[0] + 1) * self._size
        if stop > awaited.stop or token_ids[start:stop] != path.token_ids[start:stop]:
            return None
        return awaited._replace(num_tokens=max(start, stop))

    def find(self, table: BlockTable) -> list[int]:
        """Return the full blocks that hold the tokens of a table, as far as they are there."""
        path = table.path
        return [] if path is None else self.blocks_of(path.token_ids[: table.num_filled], path.scope)

    def blocks_of(self, token_ids: Sequence[int], scope: Scope) -> list[int]:
        """Return the full blocks that hold these tokens, as far as they are there."""
        tree = self._tree
        nodes = tree.walk(scope, token_ids, len(token_ids))
        return list(takewhile(lambda block: block not in tree.pending, nodes))

    # --- a sequence's path ----------------------------------------------------------------------------------------

    def begin(
        self, table: BlockTable, token_ids: Sequence[int], scope: Scope, num_found: int, *, keeps_all: bool
    ) -> None:
        """Give a table a path that begins with `num_found` blocks of a match."""
        table.path = Path(token_ids, scope, num_found, keeps_all)

    def fork(self, parent: BlockTable, child: BlockTable, token_ids: Sequence[int] | None) -> None:
        """Give a fork a copy of its parent's path; without tokens of its own it has none, and cannot be found."""
        if parent.path is None or token_ids is None:
            child.path = None
            return
        child.path = replace(parent.path, token_ids=token_ids, keeps_all=False, pending=None)
        if child.path.swap_in_pending:
            self._swapping_in.append(child.path)

    def swap_in(self, table: BlockTable, num_found: int) -> None:
        """Begin a path anew for a sequence that the step under way swaps in, with the columns that it found."""
        if (path := table.path) is not None:
            path.num_blocks, path.swap_in_pending = num_found, True
            self._swapping_in.append(path)

    def publish(self, table: BlockTable, num_tokens: int, *, num_computed: int | None = None) -> None:
        """Put the full blocks of the first `num_tokens` tokens into the tree, or adopt those that it has.

        Ends where another sequence computes the same block in this step: that one will be adopted later.
        `num_computed`: this sequence computes the tokens behind these in this step, so blocks with any of them become
        pending nodes, unless the tree has the same ones.
        """
        path, stop = table.path, num_tokens // self._size
        if path is None or path.swap_in_pending or path.num_blocks >= stop:
            return
        tree, node, first = self._tree, self._last_node(path, table), path.num_blocks
        first_pending = stop if num_computed is None else num_computed // self._size
        packed = as_bytes(path.token_ids[first * self._size : stop * self._size])
        for column in range(first, stop):
            block = table.columns[column]
            if node is None or block == NULL_BLOCK:
                return
            key = tree.key_at(node, packed, column - first)
            found = tree.find(key)
            if found is None:
                tree.insert(node, key, block)
                found = block
                if column >= first_pending:
                    self._await(path, column, block)
            elif num_computed is not None or found in tree.pending:
                return
            elif found != block:
                table.replace(column, found)
            node, path.num_blocks = found, column + 1

    def publish_all(self, tables: Iterable[BlockTable]) -> None:
        """Put all full blocks of some tables into the tree."""
        for table in tables:
            if table.path is not None and table.path.num_blocks < table.num_tokens // self._size:
                self.publish(table, table.num_tokens)

    def keeps(self, table: BlockTable, first_seen: int) -> bool:
        """Return whether a table will be pinned; publish what leaves the sliding window of another."""
        path = table.path
        if path is None or path.keeps_all:
            return path is not None
        if path.num_blocks < first_seen // self._size:
            self.publish(table, table.num_tokens)
        return False

    def _await(self, path: Path, column: int, block: int) -> None:
        """Make a node pending, so that a match knows what it waits for."""
        self._tree.pending.add(block)
        if path.pending is None:
            path.pending = column, block
            self._computing[block] = path

    def withdraw(
        self, table: BlockTable, *, only_pending: bool = True, first_column: int = 0, keeps_shared: bool = True
    ) -> None:
        """Remove the last nodes of a path, those of columns before `first_column` excepted.

        Pending ones, for their sequence ends before the step does; or all of them, if what it has computed earlier is
        no good either. Stops at a node with children, and with `keeps_shared` at a block with other owners, which may
        compute it. What has left the tree already, with an ancestor that was given up, leaves the path.
        """
        tree, path = self._tree, table.path
        while path is not None and not path.swap_in_pending and path.num_blocks > first_column:
            block = table.columns[path.num_blocks - 1]
            if block == NULL_BLOCK:
                return
            if block in tree:
                is_kept = tree.has_children(block) or (keeps_shared and self.pool.ref_count(block) > 1)
                if is_kept or (only_pending and block not in tree.pending):
                    return
                tree.remove(block)
            path.num_blocks -= 1
            if (computing := self._computing.pop(block, None)) is not None:
                computing.pending = None  # maybe a fork's, which shared the block when it ended

    def retract(self, table: BlockTable, num_tokens: int) -> bool:
        """Take back the append of a step that does not run, and with it all that the path has gained by it.

        Returns what `BlockTable.retract` does.
        """
        path = table.path
        if path is not None and path.pending is not None:   # a fork that had copied such a block may share it again
            self.withdraw(table, first_column=path.pending[0], keeps_shared=False)
        self.withdraw(table)
        is_copy_retracted = table.retract(num_tokens)
        if path is not None:  # blocks with other owners stay in the tree, but the table has them no more
            path.num_blocks = min(path.num_blocks, table.num_filled // self._size)
        return is_copy_retracted

    def truncate(self, table: BlockTable, num_tokens: int) -> None:
        """Take back computed tokens of a sequence, and its nodes behind them unless another sequence needs them."""
        column = num_tokens // self._size
        self.withdraw(table, only_pending=False, first_column=column)
        table.truncate(num_tokens)
        if table.path is not None:
            table.path.num_blocks = min(table.path.num_blocks, column)

    def pin(self, pin_id: int, table: BlockTable) -> None:
        """Keep what a sequence holds. All of its tokens have been computed, and no step is under way."""
        assert table.num_filled == table.num_tokens, "the last token has not been computed"
        self.publish(table, table.num_tokens)
        path = table.path
        assert path is not None, "a sequence without a path"
        assert path.num_blocks == table.num_tokens // self._size, f"{path.num_blocks} blocks of {table.blocks} found"
        self.pins.add(pin_id, table.fork(), path.token_ids[: table.num_tokens], path.scope)

    def end_step(self) -> None:
        """Let pending nodes be found: the step has succeeded, or nothing of it is left."""
        self._tree.pending.clear()
        for path in self._computing.values():
            path.pending = None
        self._computing.clear()
        while self._swapping_in:
            self._swapping_in.pop().swap_in_pending = False

    def _key(self, parent: int, path: Path, column: int) -> bytes:
        start = column * self._size
        return self._tree.key(parent, path.token_ids[start : start + self._size])

    def _last_node(self, path: Path, table: BlockTable) -> int | None:
        """Return the node that the path's next node is a child of; the root if it starts, or starts anew.

        A node that has left the tree leaves a path without end: its parent was given up although it was in use.
        None if the path's first block is no longer the sequence's own. Both need a sliding window.
        """
        if path.num_blocks > 0:
            last = table.columns[path.num_blocks - 1]
            if last != NULL_BLOCK and last in self._tree:
                return last
            path.num_blocks = 0
        return None if table.columns[0] == NULL_BLOCK else self._tree.open_root(path.scope)

    def checking(self) -> Iterator[None]:
        """Assert, in slices, that the tree is sound, that what is pending has an owner, and what is pinned is found."""
        yield from self._tree.checking()
        ownerless = [block for block in self._tree.pending if self.pool.ref_count(block) == 0]
        assert not ownerless, f"no sequence computes the pending blocks {ownerless}"
        self.pins.check()
        yield
        for pin in self.pins.values():
            nodes, num_found = self._tree.walk(pin.scope, pin.token_ids, len(pin.token_ids)), 0
            for found in in_slices(nodes):
                assert pin.table.columns[num_found : num_found + len(found)].tolist() == found, f"{found} is not pinned"
                num_found += len(found)
                yield
            num_full = len(pin.token_ids) // self._size
            assert num_found == num_full, f"a pin of {num_full} full blocks is not found: {num_found} are"

    def check_path(self, table: BlockTable) -> None:
        """Assert that the blocks of a table's path stand in the tree under its tokens, as far as they are there."""
        path = table.path
        if path is None or path.swap_in_pending:
            return
        assert path.num_blocks <= len(table.columns), f"a path of {path.num_blocks} blocks in {len(table.columns)}"
        node = self._tree.root(path.scope)
        for column in range(path.num_blocks):
            block = table.columns[column]
            if node is None or block == NULL_BLOCK or block not in self._tree:
                return
            assert self._tree.find(self._key(node, path, column)) == block, f"column {column} is not block {block}"
            node = block
