"""Assembly of a scheduler and its cache, with the parts that settings and requests ask for. Loads no torch."""

from collections.abc import Callable
from functools import partial

from quire.cache.manager import KVCacheManager
from quire.cache.prefix_cache.cache import PrefixCache
from quire.cache.prefixes import Prefixes
from quire.cache.uncached import UncachedManager
from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.entry_points import SCHEDULERS, load
from quire.core.sequence import Request
from quire.scheduling.beam_search import BeamSearches
from quire.scheduling.client_shares.policies import block_shares, fair_order
from quire.scheduling.parts import SchedulerParts
from quire.scheduling.policies import ByPriority, FirstComeFirstServed
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.waiting_lines import Lack


def make_scheduler(
    config: SchedulerConfig, cache_config: CacheConfig,
    unprepared: Callable[[Request], Lack | None] = lambda request: None,
) -> Scheduler:  # fmt: skip
    """Return the scheduler over its cache; one without paging or with static batches is an entry point."""
    parts = _parts(config, cache_config)
    if cache_config.has_blocks and (config.batching == "static" or cache_config.memory_policy != "paged"):
        return load(SCHEDULERS, "contiguous")(config, cache_config, unprepared, parts)  # type: ignore[no-any-return]
    return Scheduler(config, make_cache(cache_config), unprepared=unprepared, parts=parts)


def make_cache(config: CacheConfig) -> KVCacheManager:
    """Return a paged cache with the prefix cache that its configuration asks for, or one without blocks."""
    if not config.has_blocks:
        return UncachedManager(config)
    return KVCacheManager(config, PrefixCache(config) if config.enable_prefix_caching else Prefixes(config))


def _parts(config: SchedulerConfig, cache_config: CacheConfig) -> SchedulerParts:
    """Return the parts of a scheduler."""
    order, make_shares = ByPriority(), None
    if config.scheduling_policy == "fcfs":
        order = FirstComeFirstServed()
    elif config.scheduling_policy == "fair":
        order = fair_order()
    if config.max_kv_share < 1 and cache_config.num_blocks > 0:
        make_shares = partial(block_shares, config.max_kv_share)
    return SchedulerParts(order, make_shares, BeamSearches)
