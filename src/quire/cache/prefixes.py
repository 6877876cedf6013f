"""Prefixes of sequences in a cache: what its manager asks about them, with the answers where none can be found.

A prefix cache overrides all of it: `quire.cache.prefix_cache`.
"""

from collections.abc import Iterable, Iterator, Sequence

from quire.cache.block_pool import BlockPool
from quire.cache.block_table import BlockTable
from quire.cache.kv_events import TreeWithEvents
from quire.cache.pins import Pins
from quire.cache.prefix_tree import NO_MATCH, Awaited, PrefixMatch, Scope
from quire.cache.states import SnapshotTree
from quire.core.config import CacheConfig


class Prefixes:
    """The pool of a cache in which no sequence finds the blocks of another.

    `can_be_found`: whether some do, in a prefix cache. `events` tells which; None: nothing is told.
    """

    can_be_found = False
    events: TreeWithEvents | None = None
    snapshots: SnapshotTree | None = None   # None: the model keeps no states

    def __init__(self, config: CacheConfig) -> None:
        self.pool = BlockPool(config.num_blocks, may_be_empty=not config.has_blocks)
        self.pins = Pins(config.num_blocks, config.block_size)
        self._window = config.sliding_window
        self.num_queried = self.num_found = 0   # prompt tokens, since start: looked up, and not to be computed

    def count_query(self, num_queried: int, num_found: int) -> None:
        """Count the tokens of a prompt that were looked up, and those that need not be computed."""
        if self.can_be_found:
            self.num_queried += num_queried
            self.num_found += num_found

    # --- looking up -----------------------------------------------------------------------------------------------

    def match(
        self, token_ids: Sequence[int], stop: int, scope: Scope, like: BlockTable | None = None
    ) -> PrefixMatch:
        """Find what is there of token_ids[:stop]. Changes nothing. `like`: a table to compare with first."""
        return NO_MATCH

    def still_awaits(self, awaited: Awaited, token_ids: Sequence[int]) -> Awaited | None:
        """Return what a match of the same tokens would wait for now, None if it has to be looked up anew."""
        return None

    def find(self, table: BlockTable) -> list[int]:
        """Return the full blocks that hold the tokens of a table, as far as they are there."""
        return []

    def blocks_of(self, token_ids: Sequence[int], scope: Scope) -> list[int]:
        """Return the full blocks that hold these tokens, as far as they are there."""
        return []

    # --- a sequence's path ----------------------------------------------------------------------------------------

    def begin(
        self, table: BlockTable, token_ids: Sequence[int], scope: Scope, num_found: int, *, keeps_all: bool
    ) -> None:
        """Give a table a path that begins with `num_found` blocks of a match."""

    def fork(self, parent: BlockTable, child: BlockTable, token_ids: Sequence[int] | None) -> None:
        """Give a fork a copy of its parent's path; without tokens of its own it has none, and cannot be found."""

    def swap_in(self, table: BlockTable, num_found: int) -> None:
        """Begin a path anew for a sequence that the step under way swaps in, with the columns that it found."""

    def publish(self, table: BlockTable, num_tokens: int, *, num_computed: int | None = None) -> None:
        """Let the full blocks of the first `num_tokens` tokens be found; those behind `num_computed` after the step."""

    def publish_all(self, tables: Iterable[BlockTable]) -> None:
        """Let all full blocks be found."""

    def keeps(self, table: BlockTable, first_seen: int) -> bool:
        """Return whether a table keeps blocks before position `first_seen` that have left the sliding window."""
        return False

    def drop_unseen(self, tables: Iterable[BlockTable]) -> None:
        """Give up the blocks that no query will see again: the next one looks back on a window less one token."""
        if self._window is not None:
            for table in tables:
                first_seen = table.num_tokens - self._window + 1
                if not self.keeps(table, first_seen):
                    table.drop_before(first_seen)

    def free(self, table: BlockTable, num_computed: int) -> None:
        """Free a table; the full blocks of its first `num_computed` tokens can be found."""
        self.withdraw(table)
        self.publish(table, num_computed)
        table.free()

    def withdraw(self, table: BlockTable, *, only_pending: bool = True) -> None:
        """Let the last blocks of a table not be found: those that the step computes, or all."""

    def retract(self, table: BlockTable, num_tokens: int) -> bool:
        """Take back the append of a step that does not run, and all that can be found by it: `BlockTable.retract`."""
        return table.retract(num_tokens)

    def truncate(self, table: BlockTable, num_tokens: int) -> None:
        """Take back computed tokens of a sequence, and what can be found of them."""
        table.truncate(num_tokens)

    def end_step(self) -> None:
        """Let what was pending be found: the step has succeeded, or nothing of it is left."""

    # --- pins -----------------------------------------------------------------------------------------------------

    def pin(self, pin_id: int, table: BlockTable) -> None:
        """Keep what a sequence holds. All of its tokens have been computed, and no step is under way."""
        raise AssertionError("nothing can be pinned without a prefix cache")

    # --- checks ---------------------------------------------------------------------------------------------------

    def checking(self) -> Iterator[None]:
        """Assert, in slices, that what can be found is sound."""
        yield from ()

    def check_path(self, table: BlockTable) -> None:
        """Assert that the blocks of a table's path are found under its tokens, as far as they are there."""
        assert table.path is None, "a path without a prefix cache"
