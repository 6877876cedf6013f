"""A block pool that measures how long some of its blocks are kept: from allocation to eviction, and between uses.

Times are those of steps, for a pool has no clock: whoever plans a step sets `now_s`. A use is what adds an owner:
a prefix that is found again, or a branch. Metrics as those of vLLM's `--kv-cache-metrics`.
"""

from itertools import pairwise

from quire.cache.block_pool import BlockArray, BlockPool, CachedBlocks
from quire.core.deltas import BlockLife

_MAX_USES = 4                   # latest ones of a block, as in vLLM
_STRIDE, _SPAN = 0x9E3779B1, 1 << 32    # fractions of multiples of the golden ratio are spread evenly (Weyl 1916)


class MeasuredPool(BlockPool):
    """A pool that measures `share` of the allocations of blocks, above 0 and at most 1."""

    __slots__ = ("_limit", "_num_allocated", "_uses", "lives", "now_s")

    def __init__(self, num_blocks: int, cached: CachedBlocks, share: float) -> None:
        super().__init__(num_blocks, cached)
        self._limit, self._num_allocated = int(share * _SPAN), 0
        self._uses: dict[int, list[float]] = {}     # measured blocks: when allocated, and the latest uses
        self.lives: list[BlockLife] = []            # blocks evicted since this was last emptied
        self.now_s = 0.0

    def allocate(self, count: int) -> list[int]:
        """Allocate, as `BlockPool.allocate`."""
        blocks = super().allocate(count)
        for block in blocks:
            self._num_allocated += 1
            if self._num_allocated * _STRIDE % _SPAN < self._limit:
                self._uses[block] = [self.now_s]
            else:
                self._uses.pop(block, None)
        return blocks

    def share(self, block: int) -> None:
        """Add an owner, as `BlockPool.share`."""
        super().share(block)
        self._use(block)

    def share_all(self, blocks: BlockArray) -> None:
        """Add an owner to each, as `BlockPool.share_all`."""
        super().share_all(blocks)
        for block in blocks.tolist():
            self._use(block)

    def _use(self, block: int) -> None:
        if (uses := self._uses.get(block)) is not None:
            uses.append(self.now_s)
            if len(uses) > 1 + _MAX_USES:
                del uses[1]

    def _evict(self) -> list[int]:
        evicted = super()._evict()
        for block in evicted:
            if (uses := self._uses.pop(block, None)) is not None:
                gaps_s = [later - earlier for earlier, later in pairwise(uses[1:])]
                self.lives.append(BlockLife(self.now_s - uses[0], self.now_s - uses[-1], gaps_s))
        return evicted
