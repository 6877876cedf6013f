"""BuddyPool: blocks in contiguous runs, as the systems before paging had them (Kwon et al. 2023, section 6.1).

A run stands in a chunk: the smallest power of two of blocks that holds it. The pool need not be a power of two: it is
cut into regions that are, the largest first, so that every chunk begins at a multiple of its size, and its buddy is
where one bit of its first block differs. Two free buddies become one chunk.
Invariant after every call: each block is in one free chunk, or in the chunk of one run.
"""

from collections import Counter
from collections.abc import Iterator

from quire.cache.block_pool import BlockArray, BlockPool, OutOfBlocksError


class BuddyPool(BlockPool):
    """Blocks 0..num_blocks - 1. What a chunk has more than its run needs is lost for as long as the run lasts."""

    __slots__ = ("_chunk_of", "_free", "_num_free", "_num_held", "_orders")

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._free: list[set[int]] = [set() for _ in range(num_blocks.bit_length())]  # first blocks, by order
        self._orders: dict[int, int] = {}      # orders of the chunks of runs, by their first blocks
        self._num_held: dict[int, int] = {}    # blocks with an owner in each of them
        self._chunk_of = [0] * num_blocks      # the first block of the chunk that a block in use stands in
        self._num_free = num_blocks
        for order in range(num_blocks.bit_length()):
            if num_blocks >> order & 1:        # the larger regions lie before it
                self._free[order].add((num_blocks >> order + 1) << order + 1)

    @property
    def num_free_blocks(self) -> int:
        """Blocks in free chunks."""
        return self._num_free

    def num_runs(self, length: int, *, when_empty: bool = False) -> int:
        """Return how many runs of `length` blocks could be allocated now, or if nothing else were in the pool."""
        order = _order(length)
        if when_empty:
            return self.num_blocks >> order
        return sum(len(chunks) << larger - order for larger, chunks in enumerate(self._free) if larger >= order)

    def allocate(self, count: int) -> list[int]:
        """Return a run of `count` blocks with one owner each, or raise OutOfBlocksError and change nothing.

        It comes from the smallest free chunk that holds it, of equal ones from the lowest.
        """
        order = _order(count)
        larger = next((each for each in range(order, len(self._free)) if self._free[each]), None)
        if larger is None:
            raise OutOfBlocksError(f"no chunk of {1 << order} blocks: {self._num_free} of {self.num_blocks} are free")
        first = min(self._free[larger])
        self._free[larger].remove(first)
        for smaller in range(order, larger):
            self._free[smaller].add(first + (1 << smaller))
        run = list(range(first, first + count))
        for block in run:
            self._set_owners(block, 0, 1)
            self._chunk_of[block] = first
        self._orders[first], self._num_held[first] = order, count
        self._num_free -= 1 << order
        return run

    def release(self, block: int) -> None:
        """Drop one owner. When the last one of a whole run goes, its chunk is free."""
        owners = self.ref_count(block)
        assert owners > 0, f"block {block} freed twice"
        self._set_owners(block, owners, owners - 1)
        first = self._chunk_of[block]
        self._num_held[first] -= owners == 1
        if self._num_held[first] == 0:
            del self._num_held[first]
            self._free_chunk(first, self._orders.pop(first))

    def release_all(self, blocks: BlockArray) -> None:
        """Drop one owner of each of several blocks."""
        for block in blocks.tolist():
            self.release(block)

    def _free_chunk(self, first: int, order: int) -> None:
        """Free a chunk; merge it with its buddy as long as that is free, too."""
        self._num_free += 1 << order
        while (buddy := first ^ 1 << order) in self._free[order]:
            self._free[order].remove(buddy)
            first, order = min(first, buddy), order + 1
        self._free[order].add(first)

    def checking(self) -> Iterator[None]:
        """Assert that chunks cover the pool, each block once, that none has a free buddy, and that all is counted."""
        free = {first: order for order, chunks in enumerate(self._free) for first in chunks}
        ends = dict[int, int]()
        for first, order in (free | self._orders).items():
            assert first % (1 << order) == 0, f"a chunk of {1 << order} blocks begins at {first}"
            assert first ^ 1 << order not in self._free[order] or first in self._orders, f"{first} has a free buddy"
            ends[first] = first + (1 << order)
        edges = sorted([*ends, self.num_blocks])
        assert [0, *sorted(ends.values())] == edges, f"free chunks {free}, of runs {self._orders}"
        assert self._num_free == sum(1 << order for order in free.values()), f"{self._num_free} free, but {free}"
        held = Counter(self._chunk_of[block] for block, owners in enumerate(self._ref_counts) if owners)
        assert held == self._num_held, f"{held} blocks with owners, but {self._num_held} were counted"
        counted, walked = self.count_blocks_by_owners(), Counter(self._ref_counts)
        assert counted == walked, f"blocks by owners are {walked}, but {counted} were counted"
        yield  # all in one slice: this pool is for comparisons, not for service


def _order(length: int) -> int:
    """Return the order of the chunk that holds a run: its size is two to the power of that."""
    assert length >= 1, f"a run of {length} blocks"
    return (length - 1).bit_length()
