"""A sequence's map from positions to blocks: position // block_size -> block.

Blocks are filled from the left, and a table never holds a block that it does not need: it has exactly
ceil(num_tokens / block_size) columns. A full block is never written again, so any number of tables may share it; a
shared block that is partly filled is copied before the first write to it. Kwon et al. 2023, sections 4.3 and 4.4.

A table may start with full blocks that other sequences have computed. If those hold all known tokens of a sequence,
the last token is computed once more for its logits, and not written again.

The columns are an array of numbers, so that a fork of 8,192 blocks is one copy of memory and one bulk change of
reference counts.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from quire.cache.block_pool import BlockArray, BlockPool
from quire.cache.prefix_tree import Path
from quire.core.plan import BlockCopy

NULL_BLOCK = -1  # stands in a column of a dropped block: no query reads it any more


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` tokens of one sequence that shares nothing."""
    return -(-num_tokens // block_size)


def worst_case_blocks(num_prompt_tokens: int, max_tokens: int, n: int, block_size: int) -> int:
    """Return the most blocks that a request of `n` branches can hold at once.

    The branches share the full blocks of the prompt for as long as they live; all that comes after, the block in
    which the prompt ends included, each may come to own. A sliding window only lowers the figure.
    """
    num_shared = num_prompt_tokens // block_size
    return num_shared + n * (blocks_for(num_prompt_tokens + max_tokens, block_size) - num_shared)


class TableUpdate(NamedTuple):
    """Columns that have changed: `first_column` and those after it now hold `blocks`, up to the table's end.

    `copy`, if any, must run before the forward pass that writes the appended tokens; its `dst` is among `blocks`.
    `is_stored`: the one token appended has its keys and values in the cache already; nothing may be written.
    """

    first_column: int
    blocks: list[int]
    copy: BlockCopy | None = None
    is_stored: bool = False


class BlockTable:
    """The blocks of one sequence, in order of position. `num_tokens` counts the tokens that have slots."""

    __slots__ = (
        "_before_write", "_block_size", "_first_replaced", "_num_stored", "_pool", "_writable_end", "columns", "is_cut",
        "num_dropped", "num_tokens", "path",
    )  # fmt: skip

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self._pool = pool
        self._block_size = block_size
        self.columns = array("q")  # the block of each; only the table itself changes it
        self.num_tokens = 0
        self.path: Path | None = None  # its blocks' way through a prefix cache, if it has one
        self.is_cut = False     # truncated inside of a block that other tables or the prefix cache still hold whole
        self.num_dropped = 0   # leading columns that hold NULL_BLOCK
        self._num_stored = 0    # tokens that the blocks it began with hold, up to one more than num_tokens
        self._first_replaced: int | None = None  # first column that no update has reported yet
        # num_tokens, the last block and is_cut before the last append that copied that block or ended its cut
        self._before_write: tuple[int, int, bool] | None = None
        # Tokens up to here need no new column and no copy. It stays at num_tokens while the last block may have other
        # owners. Only our own fork adds one, so it can be too low (an owner has left since) but never too high.
        self._writable_end = 0

    @property
    def blocks(self) -> list[int]:
        """The block of each column, as a new list. Linear in the columns."""
        return self.columns.tolist()

    def as_array(self) -> BlockArray:
        """Return the columns as a view, for use at once: while it lives, the table cannot grow."""
        return np.frombuffer(self.columns, dtype=np.int64)

    @property
    def num_filled(self) -> int:
        """Tokens that stand in the blocks: all but the last of them may have been appended."""
        return max(self.num_tokens, self._num_stored)

    def append(self, count: int) -> TableUpdate | None:
        """Give slots to `count` more tokens; return what changed in the table, None if no column did.

        Raises OutOfBlocksError, and changes nothing, when the pool lacks blocks.
        """
        end = self.num_tokens + count
        if end <= self._writable_end and count > 0:
            self.num_tokens = end
            return None
        return self._grow(count)

    @staticmethod
    def append_where_room(tables: Iterable["BlockTable"]) -> list[int]:
        """Give a slot to one more token of each table where no column changes; return the places of the rest.

        What `append(1)` does for almost all sequences in almost all steps, without a call for each.
        """
        full = []
        for place, table in enumerate(tables):
            if table.num_tokens < table._writable_end:
                table.num_tokens += 1
            else:
                full.append(place)
        return full

    @staticmethod
    def append_blocks(tables: Sequence["BlockTable"]) -> list[int] | None:
        """Give a block, and its first slot, to each of some tables of one pool; return the blocks in their order.

        None, and nothing changed, if `append(1)` would do anything else to one of them, or there are too few blocks.
        """
        for table in tables:
            num_slots = len(table.columns) * table._block_size
            if table.num_tokens != num_slots or table._writable_end != num_slots or table._num_stored > num_slots:
                return None
            if table.is_cut or table._first_replaced is not None:
                return None
        pool = tables[0]._pool
        if len(tables) > pool.num_free_blocks:
            return None
        blocks = pool.allocate(len(tables))
        for table, block in zip(tables, blocks, strict=True):
            table.columns.append(block)
            table.num_tokens += 1
            table._writable_end += table._block_size
        return blocks

    def begin(self, blocks: Sequence[int], num_tokens: int) -> None:
        """Begin an empty table with full blocks that are in use or cached.

        `num_tokens` is how many of their tokens count as appended: all, or all but the last.
        """
        assert not self.columns, f"a table of {self.num_tokens} tokens has begun already"
        assert 0 <= len(blocks) * self._block_size - num_tokens <= 1, f"{num_tokens} tokens in {len(blocks)} blocks"
        self.columns = array("q", blocks)
        self._pool.share_all(self.as_array())
        self.num_tokens = self._writable_end = num_tokens
        self._num_stored = len(blocks) * self._block_size

    def replace(self, column: int, block: int) -> None:
        """Put another block with the same content in a column: equal content is stored once.

        The next append reports it. Nothing may be computed on the table before that.
        """
        self._pool.share(block)
        self._pool.release(self.columns[column])
        self.columns[column] = block
        self._first_replaced = column if self._first_replaced is None else min(column, self._first_replaced)
        self._writable_end = self.num_tokens

    def num_blocks_to_append(self, count: int) -> int:
        """Return how many blocks `append(count)` would take from the pool, a copy of the last block included."""
        assert count >= 0, f"cannot append {count} tokens"
        num_columns = blocks_for(self.num_tokens + count, self._block_size)
        return num_columns - len(self.columns) + (count > 0 and self._must_copy_last())

    def fork(self) -> "BlockTable":
        """Return a table of the same tokens that shares every block."""
        self._writable_end = self.num_tokens
        return self._twin(self._pool, self.columns[:])

    def become(self, parent: "BlockTable") -> None:
        """Give up every block and share those of another table in the same pool: `free`, then a fork of `parent`.

        Changes the reference counts of those columns only in which the two differ: for two branches that have forked
        late, those behind their fork.
        """
        parent._writable_end = parent.num_tokens
        own, new = self.as_array(), parent.as_array()
        num_common = min(len(own), len(new))
        differing = np.flatnonzero(own[:num_common] != new[:num_common])
        gained = np.concatenate([new[differing], new[num_common:]])
        lost = np.concatenate([own[differing], own[num_common:]])
        self._pool.share_all(gained[gained != NULL_BLOCK])
        self._pool.release_all(lost[lost != NULL_BLOCK][::-1])
        self.columns = parent.columns[:]
        self._first_replaced = self._before_write = None
        self._take_counts(parent)

    def relocate(self, pool: BlockPool, places: BlockArray) -> "BlockTable":
        """Return the table in another pool, where it shares what that has at places[b] for each block b.

        `places` has one more place at its end, which holds NULL_BLOCK.
        """
        twin = self._twin(pool, array("q", places[self.as_array()].tobytes()))
        twin.path = self.path
        return twin

    def retract(self, num_tokens: int) -> bool:
        """Take back the append of a step that does not run, after which there are `num_tokens` again.

        True if that takes back a copy, too. Blocks that have left the sliding window are not restored.
        """
        if num_tokens == self.num_tokens:
            return False
        assert num_tokens < self.num_tokens, f"{num_tokens} tokens are more than {self.num_tokens}"
        self.num_tokens = self._writable_end = num_tokens
        while len(self.columns) > blocks_for(self.num_filled, self._block_size):
            self._pool.release(self.columns.pop())
        before, self._before_write = self._before_write, None
        if before is None or before[0] != num_tokens:
            return False
        _, last, self.is_cut = before       # cut again also without a copy: a table that copied the block may share it
        if self.columns[-1] == last:
            return False
        self._pool.share(last)
        self._pool.release(self.columns[-1])
        self.columns[-1] = last
        return True

    def truncate(self, num_tokens: int) -> None:
        """Take back computed tokens: the first `num_tokens` stay, the blocks behind them are released.

        A last block that is cut while it has other owners, or can be found by others, is copied before the next write.
        """
        assert self.num_dropped * self._block_size <= num_tokens <= self.num_tokens, f"{num_tokens} tokens cannot stay"
        num_columns = blocks_for(num_tokens, self._block_size)
        is_inside = num_tokens % self._block_size > 0
        was_cut = self.is_cut and num_columns == len(self.columns)
        self._pool.release_all(self.as_array()[num_columns:][::-1])
        del self.columns[num_columns:]
        self.num_tokens = self._num_stored = self._writable_end = num_tokens
        self._before_write = None
        if self._first_replaced is not None and self._first_replaced >= num_columns:
            self._first_replaced = None
        self.is_cut = is_inside and (was_cut or self._pool.is_readable_elsewhere(self.columns[-1]))

    def rewind(self) -> None:
        """Let the last token be appended once more, for its logits: its keys and values stay, and no block changes."""
        assert self.num_tokens > 0, "a table without tokens"
        self._num_stored = self.num_filled
        self.num_tokens = self._writable_end = self._num_stored - 1
        self._before_write = None

    def free(self) -> None:
        """Give up every block; the table is empty afterwards.

        The last column goes first: the pool hands out what came back last, so the next table of this length gets
        the blocks in the same order.
        """
        self._pool.release_all(self.as_array()[self.num_dropped :][::-1])
        self.columns = array("q")
        self._first_replaced = self._before_write = None
        self.is_cut = False
        self.num_tokens = self.num_dropped = self._num_stored = self._writable_end = 0

    def locate(self, position: int) -> tuple[int, int]:
        """Return (block, offset in the block) of a token. IndexError past the end and where the block was dropped.

        The map by its definition, one token at a time; steps compute the slots of all their tokens from whole tables.
        """
        if not 0 <= position < self.num_tokens:
            raise IndexError(f"position {position} is outside of a table of {self.num_tokens} tokens")
        column, offset = divmod(position, self._block_size)
        if column < self.num_dropped:
            raise IndexError(f"position {position} was dropped: its block has left the sliding window")
        return self.columns[column], offset

    def drop_before(self, position: int) -> int:
        """Give up the blocks that lie wholly before `position`; return how many. Their columns hold NULL_BLOCK."""
        num_dropped = position // self._block_size
        num_released = num_dropped - self.num_dropped
        if num_released <= 0:
            return 0
        if position > self.num_tokens:
            raise IndexError(f"cannot drop before position {position}: the table has {self.num_tokens} tokens")
        for column in range(self.num_dropped, num_dropped):
            self._pool.release(self.columns[column])
            self.columns[column] = NULL_BLOCK
        self.num_dropped = num_dropped
        return num_released

    def check(self) -> None:
        """Assert what must hold for this table, however its blocks are shared."""
        columns, dropped = self.as_array(), self.num_dropped
        assert len(columns) == blocks_for(self.num_filled, self._block_size), f"{self.num_filled} tokens in {columns}"
        assert self._num_stored - self.num_tokens <= 1, f"{self._num_stored} stored of {self.num_tokens} tokens"
        assert (columns[:dropped] == NULL_BLOCK).all(), f"{dropped} columns dropped in {columns}"
        assert NULL_BLOCK not in columns[dropped:], f"no block {NULL_BLOCK} was dropped in {columns}"
        assert self._pool.ref_counts(columns[dropped:]).all(), f"a free block in {columns}"
        assert self._writable_end in {self.num_tokens, len(columns) * self._block_size}, f"end {self._writable_end}"
        is_own = self._writable_end == self.num_tokens or self._pool.ref_count(self.columns[-1]) == 1
        assert is_own, "shared but writable"

    def _twin(self, pool: BlockPool, columns: "array[int]") -> "BlockTable":
        """Return a table of the same tokens that shares these blocks of a pool."""
        twin = BlockTable(pool, self._block_size)
        twin.columns = columns
        pool.share_all(twin.as_array()[self.num_dropped :])
        twin._take_counts(self)
        return twin

    def _take_counts(self, other: "BlockTable") -> None:
        """Hold the tokens that another table holds, in blocks that both share."""
        self.num_tokens = self._writable_end = other.num_tokens
        self.num_dropped, self._num_stored, self.is_cut = other.num_dropped, other._num_stored, other.is_cut

    def _must_copy_last(self) -> bool:
        """Return whether the next token goes into a block that is shared, or was cut while it was."""
        if self.num_filled % self._block_size == 0:
            return False
        last = self.columns[-1]
        return self._pool.is_readable_elsewhere(last) if self.is_cut else self._pool.ref_count(last) > 1

    def _grow(self, count: int) -> TableUpdate | None:
        """Append where a column may have to change: take fresh blocks, the first in place of a shared last one."""
        if count > 0 and self._num_stored > self.num_tokens:
            return self._append_stored(count)
        fresh = self._pool.allocate(self.num_blocks_to_append(count))
        if count == 0:
            return None
        first_column, copy, end = len(self.columns), None, self.num_tokens + count
        is_copied = len(fresh) > blocks_for(end, self._block_size) - first_column   # one of them is for the last block
        if is_copied or self.is_cut:
            self._before_write = self.num_tokens, self.columns[-1], self.is_cut
        if is_copied:
            first_column -= 1
            copy = BlockCopy(self.columns.pop(), fresh[0])
            self._pool.release(copy.src)
        self.columns.extend(fresh)
        self.num_tokens, self.is_cut = end, False
        self._writable_end = len(self.columns) * self._block_size
        if self._first_replaced is not None:
            return self._update(first_column, copy)
        return TableUpdate(first_column, fresh, copy) if fresh else None

    def _append_stored(self, count: int) -> TableUpdate:
        """Append the last of the tokens that the blocks hold already."""
        assert count == 1, f"{count} tokens appended where one was left out"
        self.num_tokens = self._writable_end = self._num_stored
        return self._update(len(self.columns), is_stored=True)

    def _update(self, first_column: int, copy: BlockCopy | None = None, *, is_stored: bool = False) -> TableUpdate:
        """Return what was not reported yet: columns from `first_column` on, and from the first replaced one."""
        if self._first_replaced is not None:
            first_column = max(min(first_column, self._first_replaced), self.num_dropped)
            self._first_replaced = None
        return TableUpdate(first_column, self.columns[first_column:].tolist(), copy, is_stored)
