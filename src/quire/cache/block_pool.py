"""Fixed pool of the KV-cache blocks of one tier: hand out, share, take back.

Counts owners of blocks; never touches a tensor. Kwon et al. 2023, sections 4.2 to 4.4. Freed blocks are handed out
again before blocks that were never used, the one freed last first: few blocks stay warm, and memory that nobody has
needed yet is never touched. Invariant after every call: a block is free exactly when its reference count is 0.
"""

from collections import Counter

from quire.core.errors import EngineError


class OutOfBlocksError(EngineError):
    """The pool cannot serve the call. Nothing was changed; the scheduler preempts and retries."""


class BlockPool:
    """Blocks 0..num_blocks - 1, each free or with one owner or more."""

    __slots__ = ("_freed", "_next_unused", "_num_by_owners", "_ref_counts", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._num_by_owners = Counter({0: num_blocks})
        self._freed: list[int] = []  # a stack: the block freed last is on top
        self._next_unused = 0        # this block and all above it have never been handed out

    @property
    def num_free_blocks(self) -> int:
        """Blocks without an owner."""
        return len(self._freed) + self.num_blocks - self._next_unused

    def ref_count(self, block: int) -> int:
        """Return the number of owners of `block`, 0 for a free one."""
        assert 0 <= block < self.num_blocks, f"no block {block} in a pool of {self.num_blocks}"
        return self._ref_counts[block]

    def count_blocks_by_owners(self) -> Counter[int]:
        """Return how many blocks have how many owners; key 0 counts the free ones."""
        return +self._num_by_owners

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one owner each, or raise OutOfBlocksError and change nothing.

        Freed blocks come first, the one freed last at the front, then never-used ones in ascending order.
        """
        assert count >= 0, f"cannot allocate {count} blocks"
        if count > self.num_free_blocks:
            raise OutOfBlocksError(f"need {count} blocks, {self.num_free_blocks} of {self.num_blocks} are free")
        blocks = [self._freed.pop() for _ in range(min(count, len(self._freed)))]
        first_unused = self._next_unused
        self._next_unused += count - len(blocks)
        blocks.extend(range(first_unused, self._next_unused))
        for block in blocks:
            self._ref_counts[block] = 1
        self._num_by_owners[0] -= count
        self._num_by_owners[1] += count
        return blocks

    def share(self, block: int) -> None:
        """Add one owner to a block in use."""
        owners = self.ref_count(block)
        assert owners > 0, f"block {block} is free and cannot be shared"
        self._set_owners(block, owners, owners + 1)

    def release(self, block: int) -> None:
        """Drop one owner; the last one gives the block back."""
        owners = self.ref_count(block)
        assert owners > 0, f"block {block} freed twice"
        self._set_owners(block, owners, owners - 1)
        if owners == 1:
            self._freed.append(block)

    def _set_owners(self, block: int, before: int, after: int) -> None:
        self._ref_counts[block] = after
        self._num_by_owners[before] -= 1
        self._num_by_owners[after] += 1

    def check(self) -> None:
        """Assert that the free blocks are exactly those without an owner, each listed once."""
        free = sorted([*self._freed, *range(self._next_unused, self.num_blocks)])
        ownerless = [block for block, owners in enumerate(self._ref_counts) if owners == 0]
        assert free == ownerless, f"free list {free}, blocks without an owner {ownerless}"
        assert min(self._ref_counts) >= 0, f"negative reference count in {self._ref_counts}"
        counted, walked = self.count_blocks_by_owners(), Counter(self._ref_counts)
        assert counted == walked, f"blocks by owners are {walked}, but {counted} were counted"
