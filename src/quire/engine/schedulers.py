"""Assembly of a scheduler and its cache, by their configurations. Loads no torch."""

from collections.abc import Callable

from quire.cache.manager import KVCacheManager
from quire.cache.prefix_cache import PrefixCache
from quire.cache.prefixes import Prefixes
from quire.cache.uncached import UncachedManager
from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.optional_package import SCHEDULERS, load
from quire.core.sequence import Request
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.waiting_lines import Lack


def make_scheduler(
    config: SchedulerConfig, cache_config: CacheConfig,
    unprepared: Callable[[Request], Lack | None] = lambda request: None,
) -> Scheduler:  # fmt: skip
    """Return the scheduler over its cache; one without paging or with static batches is an entry point."""
    if cache_config.has_blocks and (config.batching == "static" or cache_config.memory_policy != "paged"):
        return load(SCHEDULERS, "contiguous")(config, cache_config, unprepared)  # type: ignore[no-any-return]
    return Scheduler(config, make_cache(cache_config), unprepared=unprepared)


def make_cache(config: CacheConfig) -> KVCacheManager:
    """Return a paged cache with the prefix cache that its configuration asks for, or one without blocks."""
    if not config.has_blocks:
        return UncachedManager(config)
    return KVCacheManager(config, PrefixCache(config) if config.enable_prefix_caching else Prefixes(config))
