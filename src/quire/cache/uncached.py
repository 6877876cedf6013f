"""The cache of a model that keeps no keys and values: sequences have tokens, and no blocks.

The same interface as paged memory, so the scheduler sees no difference: a table counts its tokens and never has a
column, and nothing waits for blocks, is preempted for them or finds a prefix.
"""

from quire.cache.block_table import BlockTable, TableUpdate
from quire.cache.manager import KVCacheManager
from quire.core.config import CacheConfig


class TokenCount(BlockTable):
    """A table without blocks."""

    __slots__ = ()

    def append(self, count: int) -> TableUpdate | None:
        """Count tokens."""
        self.num_tokens += count
        return None

    def truncate(self, num_tokens: int) -> None:
        """Take back tokens."""
        assert 0 <= num_tokens <= self.num_tokens, f"{num_tokens} tokens cannot stay of {self.num_tokens}"
        self.num_tokens = num_tokens

    def check(self) -> None:
        """Assert that no block is held."""
        assert not self.columns, f"blocks {self.columns} without a cache"
        assert self.num_tokens >= 0


class UncachedManager(KVCacheManager):
    """A manager of no blocks. `config`: of 0 blocks, without prefix caching and swap space."""

    __slots__ = ()

    def __init__(self, config: CacheConfig) -> None:
        assert not config.has_blocks, f"{config}"
        assert config.num_swap_blocks == 0, f"{config}"
        assert not config.enable_prefix_caching, f"{config}"
        super().__init__(config)

    def blocks_for(self, num_tokens: int) -> int:
        """Return 0: no token takes a block."""
        return 0

    def _new_table(self, num_reserved: int) -> TokenCount:
        return TokenCount(self._pool, self.block_size)
