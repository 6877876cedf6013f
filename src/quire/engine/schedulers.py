"""Assembly of a scheduler and its cache, with the optional parts that settings and requests ask for. Loads no torch."""

import logging
from collections.abc import Callable
from functools import partial

from quire.cache.manager import KVCacheManager
from quire.cache.prefixes import Prefixes
from quire.cache.uncached import UncachedManager
from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.errors import ConfigError, InvalidRequestError
from quire.core.optional_package import absent_package, needs_package
from quire.core.sequence import Request
from quire.scheduling.parts import SchedulerParts, Searches
from quire.scheduling.policies import ByPriority, FirstComeFirstServed
from quire.scheduling.queues import RequestQueues
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.waiting_lines import Lack

CLIENT_SHARES = "quire.scheduling.client_shares"
PREFIX_CACHE = "quire.cache.prefix_cache"

log = logging.getLogger(__name__)


def make_scheduler(
    config: SchedulerConfig, cache_config: CacheConfig,
    unprepared: Callable[[Request], Lack | None] = lambda request: None,
) -> Scheduler:  # fmt: skip
    """Return the scheduler over its cache; the baselines are loaded only if the settings name one of them."""
    parts, cache = _parts(config, cache_config), make_cache(cache_config)
    if not cache_config.has_blocks or (cache_config.memory_policy == "paged" and config.batching == "continuous"):
        return Scheduler(config, cache, unprepared=unprepared, parts=parts)
    from quire.scheduling.baselines.static_batching import make_baseline  # noqa: PLC0415 (a room: it can be absent)

    return make_baseline(config, cache, unprepared, parts)


def make_cache(config: CacheConfig) -> KVCacheManager:
    """Return a cache of the configuration's memory policy, and with the prefix cache that it asks for."""
    if not config.has_blocks:
        return UncachedManager(config)
    if config.memory_policy == "paged":
        return KVCacheManager(config, _prefixes(config))
    from quire.cache.baselines.contiguous import ContiguousManager  # noqa: PLC0415 (a room: it can be absent)

    return ContiguousManager(config)


def _prefixes(config: CacheConfig) -> Prefixes:
    """Return the prefix cache of a configuration. Where it is off, or its package absent, no prefix is found."""
    if config.enable_prefix_caching:
        try:
            from quire.cache.prefix_cache.cache import PrefixCache  # noqa: PLC0415 (a room: it can be absent)
        except ModuleNotFoundError as error:
            if absent_package(error, PREFIX_CACHE) is None:
                raise
            log.warning("prefixes are not cached: the package %s is not in this installation", PREFIX_CACHE)
        else:
            return PrefixCache(config)
    return Prefixes(config)


def _parts(config: SchedulerConfig, cache_config: CacheConfig) -> SchedulerParts:
    """Return the parts of a scheduler. ConfigError for a setting whose package is absent."""
    order, make_shares = ByPriority(), None
    if config.scheduling_policy == "fcfs":
        order = FirstComeFirstServed()
    elif config.scheduling_policy == "fair":
        with needs_package("scheduling_policy fair", CLIENT_SHARES, error=ConfigError):
            from quire.scheduling.client_shares.policies import fair_order  # noqa: PLC0415 (a room: it can be absent)
        order = fair_order()
    if config.max_kv_share < 1 and cache_config.num_blocks > 0:
        with needs_package(f"max_kv_share_per_key {config.max_kv_share}", CLIENT_SHARES, error=ConfigError):
            from quire.scheduling.client_shares.policies import block_shares  # noqa: PLC0415 (a room: it can be absent)
        make_shares = partial(block_shares, config.max_kv_share)
    return SchedulerParts(order, make_shares, _make_searches)


def _make_searches(cache: KVCacheManager, queues: RequestQueues) -> Searches:
    """Return the beam searches of a scheduler. InvalidRequestError where their package is absent."""
    with needs_package("a beam search", "quire.scheduling.beam_search", error=InvalidRequestError):
        from quire.scheduling.beam_search.searches import BeamSearches  # noqa: PLC0415 (a room: it can be absent)
    return BeamSearches(cache, queues)
