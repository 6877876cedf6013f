"""Which cached block is given up first: the policy of eviction as a small replaceable class."""

from collections import OrderedDict


class LeastRecentlyUsed:
    """Cached blocks in the order in which their last owners let go of them."""

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Count the cached blocks."""
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        """Whether a block is cached."""
        return block in self._blocks

    def add(self, block: int) -> None:
        """Take in a block whose last owner has just let go of it."""
        self._blocks[block] = None

    def remove(self, block: int) -> None:
        """Let a block go that has found an owner, or that is given up."""
        del self._blocks[block]

    def first(self) -> int:
        """Return the block to give up next; there must be one."""
        return next(iter(self._blocks))
