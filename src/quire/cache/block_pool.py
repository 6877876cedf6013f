"""Fixed pool of the KV-cache blocks of one tier: hand out, share, take back.

Counts owners of blocks; never touches a tensor. Kwon et al. 2023, sections 4.2 to 4.4. Freed blocks are handed out
again before blocks that were never used, the one freed last first: few blocks stay warm, and memory that was not
needed yet is never touched. Blocks that a prefix cache can find are kept when their last owner goes; they are handed
out last.
Reference counts are an array of numbers with a NumPy view over it: one block at a time is counted through the array,
all blocks of a table through the view, in a few microseconds per thousand blocks.
Invariant after every call: a block is in use (it has owners), cached (it has none, and can be found) or free.

A check of a million blocks takes seconds, so checks are generators that yield every millisecond: an idle engine resumes
them, and drops them as soon as anything changes.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.core.block_map import BlockState
from quire.core.errors import EngineError

BlockArray = NDArray[np.int64]  # block ids; as arguments of a pool no block is listed twice

SLICE = 2048   # blocks that Python code looks at in one slice of a check: about 1 ms
_PART = 2**16  # blocks that NumPy looks at in one slice of a check


Item = TypeVar("Item")


def in_slices(items: Iterable[Item], num_items: int = SLICE) -> Iterator[list[Item]]:
    """Yield lists of the next `num_items` items."""
    iterator = iter(items)
    while chunk := list(islice(iterator, num_items)):
        yield chunk


def run_to_the_end(work: Iterable[None]) -> None:
    """Do all of a sliced work at once: a check that yields every millisecond, for a caller that may drop it."""
    for _ in work:
        pass


class OutOfBlocksError(EngineError):
    """The pool cannot serve the call. Nothing was changed; the scheduler preempts and retries."""


class CachedBlocks:
    """The blocks without an owner that are kept, because they can be found: none. A prefix cache has some."""

    __slots__ = ()

    def can_be_found(self, block: int) -> bool:
        """Return whether a block, with owners or without, can be found by other sequences."""
        return False

    def __contains__(self, block: int) -> bool:
        """Return whether a block is cached."""
        return False

    def __iter__(self) -> Iterator[int]:
        """Yield the cached blocks."""
        return iter(())

    def __len__(self) -> int:
        """Count the cached blocks."""
        return 0

    def try_add(self, block: int) -> bool:
        """Cache a block that its last owner has released, the last to be evicted; False if it cannot be found."""
        return False

    def remove(self, block: int) -> None:
        """Take out a block that has an owner again."""

    def evict(self) -> list[int]:
        """Give up the next block, and others that cannot be found without it; they are free."""
        raise AssertionError("no block is cached")

    def checking(self, ref_counts: Sequence[int] = ()) -> Iterator[None]:
        """Check in slices. `ref_counts`, of each block: none without an owner can be found but these."""
        yield from ()


class BlockPool:
    """Blocks 0..num_blocks - 1, each free, cached, or with one owner or more. Without `cached` none is ever cached."""

    __slots__ = (
        "_cached", "_freed", "_next_unused", "_num_by_owners", "_ref_counts", "_ref_counts_view", "num_blocks",
        "num_evicted",
    )  # fmt: skip

    def __init__(self, num_blocks: int, cached: CachedBlocks | None = None, *, may_be_empty: bool = False) -> None:
        if num_blocks < (least := 0 if may_be_empty else 1):
            raise ValueError(f"num_blocks must be at least {least}, got {num_blocks}")
        self.num_blocks = num_blocks
        self._ref_counts = array("i", bytes(4 * num_blocks))
        self._ref_counts_view: NDArray[np.int32] = np.frombuffer(self._ref_counts, dtype=np.int32)
        self._num_by_owners = Counter({0: num_blocks})
        self._freed: list[int] = []  # a stack: the block freed last is on top
        self._next_unused = 0        # this block and all above it have never been handed out
        self._cached = CachedBlocks() if cached is None else cached
        self.num_evicted = 0         # cached blocks given up since start

    @property
    def num_free_blocks(self) -> int:
        """Blocks without an owner: what can be allocated. Cached ones count, for they are given up when needed."""
        return len(self._freed) + self.num_blocks - self._next_unused + len(self._cached)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks without an owner that can still be found."""
        return len(self._cached)

    def ref_count(self, block: int) -> int:
        """Return the number of owners of `block`, 0 for a free or cached one."""
        assert 0 <= block < self.num_blocks, f"no block {block} in a pool of {self.num_blocks}"
        return self._ref_counts[block]

    def ref_counts(self, blocks: BlockArray | slice = slice(None)) -> NDArray[np.int32]:
        """Return the number of owners of each of several blocks, of all by default."""
        return self._ref_counts_view[blocks]

    def is_readable_elsewhere(self, block: int) -> bool:
        """Return whether a block has several owners or can be found, so that no owner may write to it."""
        return self.ref_count(block) > 1 or self._cached.can_be_found(block)

    def cached_blocks(self) -> NDArray[np.int32]:
        """Return the cached blocks, in no order."""
        return np.fromiter(self._cached, dtype=np.int32, count=len(self._cached))

    def state(self, block: int) -> BlockState:
        """Return what a block is."""
        if self.ref_count(block) > 0:
            return "used"
        return "cached" if block in self._cached else "free"

    def count_blocks_by_owners(self) -> Counter[int]:
        """Return how many blocks have how many owners; key 0 counts the free and cached ones."""
        return +self._num_by_owners

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one owner each, or raise OutOfBlocksError and change nothing.

        Freed blocks come first, the one freed last at the front, then never-used ones in ascending order, then
        cached ones, which cannot be found any more.
        """
        assert count >= 0, f"cannot allocate {count} blocks"
        if count > self.num_free_blocks:
            raise OutOfBlocksError(f"need {count} blocks, {self.num_free_blocks} of {self.num_blocks} are free")
        blocks = [self._freed.pop() for _ in range(min(count, len(self._freed)))]
        if len(blocks) < count:
            first_unused = self._next_unused
            self._next_unused = min(first_unused + count - len(blocks), self.num_blocks)
            blocks.extend(range(first_unused, self._next_unused))
        while len(blocks) < count:
            if not self._freed:
                self._freed += self._evict()
                self.num_evicted += len(self._freed)
            blocks.append(self._freed.pop())
        for block in blocks:
            self._ref_counts[block] = 1
        self._num_by_owners[0] -= count
        self._num_by_owners[1] += count
        return blocks

    def _evict(self) -> list[int]:
        """Give up some cached blocks, which are free."""
        return self._cached.evict()

    def share(self, block: int) -> None:
        """Add one owner to a block in use or cached."""
        owners = self.ref_count(block)
        if owners == 0:
            assert block in self._cached, f"block {block} is free and cannot be shared"
            self._cached.remove(block)
        self._set_owners(block, owners, owners + 1)

    def release(self, block: int) -> None:
        """Drop one owner. When the last one goes, the block is cached if it can be found, and free if not."""
        owners = self.ref_count(block)
        assert owners > 0, f"block {block} freed twice"
        self._set_owners(block, owners, owners - 1)
        if owners == 1 and not self._cached.try_add(block):
            self._freed.append(block)

    def share_all(self, blocks: BlockArray) -> None:
        """Add one owner to each of several blocks in use or cached."""
        if not len(blocks):
            return                                          # most sequences begin so
        owners = self._owners_of(blocks)
        if not owners.all():
            for block in blocks[owners == 0].tolist():
                assert block in self._cached, f"block {block} is free and cannot be shared"
                self._cached.remove(block)
        self._ref_counts_view[blocks] = owners + 1
        self._recount(owners, 1)

    def release_all(self, blocks: BlockArray) -> None:
        """Drop one owner of each of several blocks, in the order given, as `release` does of one."""
        owners = self._owners_of(blocks)
        assert owners.all(), f"blocks {blocks[owners == 0].tolist()} freed twice"
        self._ref_counts_view[blocks] = owners - 1
        self._recount(owners, -1)
        self._freed += [block for block in blocks[owners == 1].tolist() if not self._cached.try_add(block)]

    def _owners_of(self, blocks: BlockArray) -> NDArray[np.int32]:
        assert blocks.min(initial=0) >= 0, f"no block {blocks.min()} in a pool of {self.num_blocks}"
        return self._ref_counts_view[blocks]

    def _recount(self, owners: NDArray[np.int32], change: int) -> None:
        """Take down that blocks with so many owners each have one more or one less."""
        num_by_owners = np.bincount(owners)
        for before in np.flatnonzero(num_by_owners).tolist():
            num_blocks = int(num_by_owners[before])
            self._num_by_owners[before] -= num_blocks
            self._num_by_owners[before + change] += num_blocks

    def _set_owners(self, block: int, before: int, after: int) -> None:
        self._ref_counts[block] = after
        self._num_by_owners[before] -= 1
        self._num_by_owners[after] += 1

    def check(self) -> None:
        """Assert that free and cached blocks are exactly those without an owner, each listed once."""
        run_to_the_end(self.checking())

    def checking(self) -> Iterator[None]:
        """Check in slices."""
        listed = np.zeros(self.num_blocks, dtype=np.uint8)
        listed[self._next_unused :] = 1
        for blocks in in_slices(chain(self._freed, self._cached)):
            np.add.at(listed, blocks, 1)
            yield
        walked = Counter[int]()
        for start in range(0, self.num_blocks, _PART):
            part = slice(start, start + _PART)
            counts = self._ref_counts_view[part]
            assert counts.min() >= 0, f"negative reference count in {counts}"
            wrong = np.flatnonzero(listed[part] != (counts == 0))
            assert not len(wrong), f"free list or cached: {start + wrong}, of {counts[wrong]} owners"
            walked.update(dict(enumerate(np.bincount(counts).tolist())))
            yield
        counted = self.count_blocks_by_owners()
        assert counted == +walked, f"blocks by owners are {walked}, but {counted} were counted"
        yield from self._cached.checking(self._ref_counts)
