"""A sequence's map from positions to blocks: position // block_size -> block.

Blocks are filled from the left, and a table never holds a block that it does not need: it has exactly
ceil(num_tokens / block_size) columns. A full block is never written again, so any number of tables may share it; a
shared block that is partly filled is copied before the first write to it. Kwon et al. 2023, sections 4.3 and 4.4.
"""

from typing import NamedTuple

from quire.cache.block_pool import BlockPool
from quire.core.plan import BlockCopy

NULL_BLOCK = -1  # stands in a column whose block was dropped: no query looks there any more


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
    """Columns that an append has set: `first_column` and those after it now hold `blocks`, up to the table's end.

    `copy`, if any, must run before the forward pass that writes the appended tokens; its `dst` is `blocks[0]`.
    """

    first_column: int
    blocks: list[int]
    copy: BlockCopy | None


class BlockTable:
    """The blocks of one sequence, in order of position. `num_tokens` counts the tokens that have slots."""

    __slots__ = ("_block_size", "_num_dropped", "_pool", "_writable_end", "blocks", "num_tokens")

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self._pool = pool
        self._block_size = block_size
        self.blocks: list[int] = []
        self.num_tokens = 0
        self._num_dropped = 0   # leading columns that hold NULL_BLOCK
        # Tokens up to here need no new column and no copy. It stays at num_tokens while the last block may have other
        # owners. Only our own fork adds one, so it can be too low (an owner has left since) but never too high.
        self._writable_end = 0

    def append(self, count: int) -> TableUpdate | None:
        """Give slots to `count` more tokens; return what changed in the table, None if no column did.

        Raises OutOfBlocksError, and changes nothing, when the pool lacks blocks. Called once per sequence and step:
        the common case, a decode into a block of one's own, ends at the first comparison.
        """
        end = self.num_tokens + count
        if end <= self._writable_end and count > 0:
            self.num_tokens = end
            return None
        return self._grow(count)

    def num_blocks_to_append(self, count: int) -> int:
        """Return how many blocks `append(count)` would take from the pool, a copy of the last block included."""
        assert count >= 0, f"cannot append {count} tokens"
        num_columns = -(-(self.num_tokens + count) // self._block_size)
        return num_columns - len(self.blocks) + (count > 0 and self._must_copy_last())

    def fork(self) -> "BlockTable":
        """Return a table of the same tokens that shares every block."""
        child = BlockTable(self._pool, self._block_size)
        for block in self.blocks[self._num_dropped:]:
            self._pool.share(block)
        child.blocks = self.blocks.copy()
        child.num_tokens = self.num_tokens
        child._num_dropped = self._num_dropped
        child._writable_end = self._writable_end = self.num_tokens
        return child

    def free(self) -> None:
        """Give up every block; the table is empty afterwards.

        The last column goes first: the pool hands out what came back last, so the next table of this length gets
        the blocks in the same order.
        """
        for block in reversed(self.blocks[self._num_dropped:]):
            self._pool.release(block)
        self.blocks = []
        self.num_tokens = self._num_dropped = self._writable_end = 0

    def locate(self, position: int) -> tuple[int, int]:
        """Return (block, offset in the block) of a token. IndexError past the end and where the block was dropped."""
        if not 0 <= position < self.num_tokens:
            raise IndexError(f"position {position} is outside of a table of {self.num_tokens} tokens")
        column, offset = divmod(position, self._block_size)
        if column < self._num_dropped:
            raise IndexError(f"position {position} was dropped: its block has left the sliding window")
        return self.blocks[column], offset

    def drop_before(self, position: int) -> int:
        """Give up the blocks that lie wholly before `position`; return how many. Their columns hold NULL_BLOCK."""
        num_dropped = position // self._block_size
        num_released = num_dropped - self._num_dropped
        if num_released <= 0:
            return 0
        if position > self.num_tokens:
            raise IndexError(f"cannot drop before position {position}: the table has {self.num_tokens} tokens")
        for column in range(self._num_dropped, num_dropped):
            self._pool.release(self.blocks[column])
            self.blocks[column] = NULL_BLOCK
        self._num_dropped = num_dropped
        return num_released

    def check(self) -> None:
        """Assert what must hold for this table whoever else shares its blocks."""
        columns, dropped = self.blocks, self._num_dropped
        assert len(columns) == -(-self.num_tokens // self._block_size), f"{self.num_tokens} tokens in {columns}"
        assert columns[:dropped] == [NULL_BLOCK] * dropped, f"{dropped} columns dropped in {columns}"
        assert all(self._pool.ref_count(block) > 0 for block in columns[dropped:]), f"a free block in {columns}"
        assert self._writable_end in {self.num_tokens, len(columns) * self._block_size}, f"end {self._writable_end}"
        assert self._writable_end == self.num_tokens or self._pool.ref_count(columns[-1]) == 1, "shared but writable"

    def _must_copy_last(self) -> bool:
        """The next token goes into a block that somebody else owns too."""
        return self.num_tokens % self._block_size > 0 and self._pool.ref_count(self.blocks[-1]) > 1

    def _grow(self, count: int) -> TableUpdate | None:
        """Append where a column may have to change: take fresh blocks, the first in place of a shared last one."""
        fresh = self._pool.allocate(self.num_blocks_to_append(count))
        if count == 0:
            return None
        first_column, copy = len(self.blocks), None
        if self._must_copy_last():
            first_column -= 1
            copy = BlockCopy(self.blocks.pop(), fresh[0])
            self._pool.release(copy.src)
        self.blocks += fresh
        self.num_tokens += count
        self._writable_end = len(self.blocks) * self._block_size
        return TableUpdate(first_column, fresh, copy) if fresh else None
