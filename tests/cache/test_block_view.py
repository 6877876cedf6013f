"""The block map of a cache: states, counts, and every holder in its place."""

import pytest

from quire.cache.manager import KVCacheManager
from quire.core.block_map import MAX_OWNERS_SHOWN, MAX_SPANS, BlockEntry, BlockOverview, BlockOwner
from quire.core.config import CacheConfig
from quire.scheduling.scheduler import make_cache
from support.scheduling import Harness, random_run


def begin(cache: KVCacheManager, seq_id: int, num_tokens: int) -> None:
    tokens = list(range(num_tokens))
    cache.create(seq_id, tokens)
    cache.append(seq_id, num_tokens)
    cache.end_step()


def test_every_block_has_its_state_and_its_owners() -> None:
    cache = make_cache(CacheConfig(num_blocks=6, block_size=4))
    begin(cache, 1, 8)
    cache.free(1, num_computed=8)
    cache.create(2)
    cache.append(2, 5)
    cache.fork(2, 3)
    assert cache.view_blocks(0, 6) == [
        BlockEntry(0, "cached", "kv", 0, []),
        BlockEntry(1, "cached", "kv", 0, []),
        BlockEntry(2, "used", "kv", 2, [BlockOwner(2, 0, 4), BlockOwner(3, 0, 4)]),
        BlockEntry(3, "used", "kv", 2, [BlockOwner(2, 1, 1), BlockOwner(3, 1, 1)]),
        BlockEntry(4, "free", "kv", 0, []),
        BlockEntry(5, "free", "kv", 0, []),
    ]


def test_window_is_cut_from_the_whole_and_ends_with_the_pool() -> None:
    cache = make_cache(CacheConfig(num_blocks=6, block_size=4))
    begin(cache, 1, 18)
    whole = cache.view_blocks(0, 6)
    assert [entry.block for entry in whole] == list(range(6))
    assert cache.view_blocks(2, 3) == whole[2:5]
    assert cache.view_blocks(4, 100) == whole[4:]


def test_column_of_a_dropped_block_is_nowhere() -> None:
    cache = KVCacheManager(CacheConfig(num_blocks=6, block_size=4, sliding_window=4, enable_prefix_caching=False))
    begin(cache, 1, 8)
    cache.append(1, 1)
    owners = {entry.block: entry.owners for entry in cache.view_blocks(0, 6) if entry.owners}
    assert sorted(owner.index for held in owners.values() for owner in held) == [1, 2]


def test_owners_of_one_block_are_listed_up_to_a_limit_and_counted_beyond() -> None:
    cache = make_cache(CacheConfig(num_blocks=4, block_size=4))
    begin(cache, 0, 4)
    for child in range(1, MAX_OWNERS_SHOWN + 5):
        cache.fork(0, child)
    (entry, *_) = cache.view_blocks(0, 4)
    assert entry.ref_count == MAX_OWNERS_SHOWN + 5
    assert [owner.holder for owner in entry.owners] == list(range(MAX_OWNERS_SHOWN))


def test_blocks_of_several_sequences_are_counted_once() -> None:
    cache = make_cache(CacheConfig(num_blocks=8, block_size=4, sliding_window=4))
    begin(cache, 0, 8)
    cache.fork(0, 1)
    cache.append(1, 1)
    assert cache.count_blocks([0]) == 2
    assert cache.count_blocks([1]) == 2                # its first has left the window
    assert cache.count_blocks([0, 1]) == 3
    assert cache.count_blocks([]) == 0


def test_swap_space_is_shown_with_what_swapped_sequences_share() -> None:
    cache = make_cache(CacheConfig(num_blocks=6, block_size=4, num_swap_blocks=5))
    begin(cache, 1, 6)
    cache.fork(1, 2, list(range(6)))
    cache.swap.swap_out([1, 2])
    cache.end_step()
    assert not any(entry.owners for entry in cache.view_blocks(0, 6))
    shown = cache.view_blocks(0, 5, "swap")
    used = [entry for entry in shown if entry.state == "used"]
    assert [(entry.tier, entry.ref_count, entry.owners) for entry in used] == [
        ("swap", 2, [BlockOwner(1, 0, 4), BlockOwner(2, 0, 4)]),
        ("swap", 2, [BlockOwner(1, 1, 2), BlockOwner(2, 1, 2)]),
    ]
    assert {(entry.state, entry.ref_count) for entry in shown if entry not in used} == {("free", 0)}
    assert cache.view_blocks(1, 2, "swap") == shown[1:3]


def test_swap_space_that_is_not_there_has_no_blocks() -> None:
    assert make_cache(CacheConfig(num_blocks=6, block_size=4)).view_blocks(0, 6, "swap") == []


def test_overview_has_all_blocks_in_spans_with_the_holder_of_the_most() -> None:
    cache = make_cache(CacheConfig(num_blocks=3 * MAX_SPANS - 1, block_size=4))
    begin(cache, 1, 8)
    cache.free(1, num_computed=8)           # blocks 0 and 1
    cache.create(2)
    cache.append(2, 4)                      # block 2
    cache.create(3)
    cache.append(3, 11)                     # blocks 3, 4, 5
    seen = cache.view_all()
    assert (seen.blocks_per_span, len(seen.used), len(seen.cached), len(seen.holders)) == (3, *[MAX_SPANS] * 3)
    assert (seen.used[:3], seen.cached[:3], seen.holders[:3]) == ([1, 3, 0], [2, 0, 0], [2, 3, None])


def test_overview_of_nothing_is_empty() -> None:
    assert make_cache(CacheConfig(num_blocks=6, block_size=4)).view_all("swap") == BlockOverview(1, [], [], [])


def check_map(harness: Harness) -> None:
    """The map says the same as the figures, and as the tables."""
    cache, stats = harness.cache, harness.cache.stats()
    entries = cache.view_blocks(0, cache.num_blocks)
    states = [entry.state for entry in entries]
    counts = [states.count(state) for state in ("used", "cached", "free")]
    assert counts == [stats.used_blocks, stats.cached_blocks, stats.free_blocks]
    assert all(min(entry.ref_count, MAX_OWNERS_SHOWN) == len(entry.owners) for entry in entries)
    seen = cache.view_all()
    assert [sum(seen.used), sum(seen.cached)] == counts[:2]
    assert [holder is None for holder in seen.holders] == [number == 0 for number in seen.used]
    last_empty = sum(cache.block_size - entry.owners[0].filled for entry in entries if entry.owners)
    assert last_empty == stats.tail_waste_slots
    swapped = [entry for entry in cache.view_blocks(0, stats.swap_total_blocks, "swap") if entry.state == "used"]
    assert len(swapped) == sum(cache.view_all("swap").used) == stats.swap_used_blocks
    assert all(min(entry.ref_count, MAX_OWNERS_SHOWN) == len(entry.owners) for entry in swapped)


def test_map_agrees_with_the_figures_after_each_step_of_random_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    check = Harness.check
    monkeypatch.setattr(Harness, "check", lambda harness: (check(harness), check_map(harness)))
    for seed in range(15):
        random_run(seed)
