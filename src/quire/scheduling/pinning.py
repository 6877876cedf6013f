"""What is pinned beside the requests that are here: counted, and held against what each of them may need."""

from collections.abc import Collection

from quire.cache.block_table import worst_case_blocks
from quire.cache.manager import KVCacheManager
from quire.core.errors import InvalidRequestError
from quire.core.sequence import Request
from quire.scheduling.limits import AdmissionLimits


def check_pinnable(
    num_tokens: int, requests: Collection[Request], cache: KVCacheManager, limits: AdmissionLimits
) -> None:
    """Raise InvalidRequestError if a prefix of so many tokens cannot be kept beside all that was let in."""
    if not cache.prefix_caching_enabled:
        raise InvalidRequestError("nothing can be pinned: prefix caching is off (enable_prefix_caching)")
    num_pins = len(cache.pins) + sum(request.is_pin for request in requests)
    limits.check_pinnable(num_tokens, num_pins, _most_needed_blocks(requests, cache.block_size))


def num_pinned_blocks(requests: Collection[Request], cache: KVCacheManager) -> int:
    """Return how many blocks are pinned; a pin that is under way counts with all that it may come to hold."""
    under_way = (len(request.prompt_token_ids) for request in requests if request.is_pin)
    return cache.num_pinned_blocks + sum(map(cache.blocks_for, under_way))


def check_pinned(requests: Collection[Request], cache: KVCacheManager, limits: AdmissionLimits) -> None:
    """Assert that the limits know what is pinned, and that each request that was let in can still run."""
    num_pinned = num_pinned_blocks(requests, cache)
    assert limits.num_pinned_blocks == num_pinned, f"{num_pinned} blocks are pinned, but the limits are {limits}"
    most = _most_needed_blocks(requests, cache.block_size)
    assert most + num_pinned <= limits.num_blocks, f"{num_pinned} blocks are pinned, and a request may need {most}"


def _most_needed_blocks(requests: Collection[Request], block_size: int) -> int:
    """Return the worst case of the largest request."""
    sizes = ((len(request.prompt_token_ids), request.max_tokens, request.params.n) for request in requests)
    return max((worst_case_blocks(*size, block_size) for size in sizes), default=0)
