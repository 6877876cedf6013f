"""Sliced work: what is done between two yields does not grow with the cache."""

from collections.abc import Callable

import pytest

from quire.cache.block_pool import SLICE, in_slices, run_to_the_end
from quire.cache.manager import KVCacheManager
from quire.core.config import CacheConfig
from quire.scheduling.scheduler import make_cache
from support.counted_calls import CountedCalls


def test_items_come_in_order_and_none_is_lost() -> None:
    assert list(in_slices(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(in_slices([], 3)) == []


def test_work_is_done_to_the_end() -> None:
    done = list[int]()
    run_to_the_end(done.append(number) for number in range(3))
    assert done == [0, 1, 2]


def fill_and_free(cache: KVCacheManager, num_blocks: int) -> None:
    """Leave the whole cache full of cached blocks."""
    tokens = list(range(num_blocks))
    cache.create(0, tokens)
    cache.append(0, num_blocks)
    cache.end_step()
    cache.free(0, num_blocks)


def pin_all(cache: KVCacheManager, num_blocks: int) -> None:
    """Leave all blocks to a pin."""
    tokens = list(range(num_blocks))
    cache.create(0, tokens)
    cache.append(0, num_blocks)
    cache.end_step()
    cache.pin(1, 0)
    cache.free(0, num_blocks)


@pytest.mark.parametrize("fill", [fill_and_free, pin_all])
def test_no_slice_of_a_check_grows_with_the_cache(fill: Callable[[KVCacheManager, int], None]) -> None:
    def most_calls(num_blocks: int) -> int:
        cache = make_cache(CacheConfig(num_blocks, 1, None, True, num_swap_blocks=num_blocks))
        fill(cache, num_blocks)
        most, slices, is_done = 0, cache.checking(), False
        while not is_done:
            with CountedCalls() as calls:
                is_done = next(slices, "done") == "done"
            most = max(most, calls.count)
        return most

    few, many = most_calls(3 * SLICE), most_calls(12 * SLICE)
    assert many <= few + 10
    assert many <= 8 * SLICE, "calls for each block of a slice"
