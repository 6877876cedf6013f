"""Prefixes that are kept: found to the last token, never given up, stored once. Block size 4."""

import pytest

from quire.cache.manager import KVCacheManager
from quire.cache.prefix_tree import PrefixMatch
from quire.core.config import CacheConfig
from quire.scheduling.scheduler import make_cache

PREFIX = list(range(100, 111))  # two full blocks, and three tokens
OTHER = 9


def make(num_blocks: int = 16, window: int | None = None) -> KVCacheManager:
    return make_cache(CacheConfig(num_blocks, 4, window))


def compute(manager: KVCacheManager, seq_id: int, token_ids: list[int], scope: object = None) -> None:
    """One step that computes a sequence from what is found to its end."""
    found = manager.match(token_ids, len(token_ids), scope)
    manager.create(seq_id, token_ids, scope, found, keeps_all=True)
    manager.append(seq_id, len(token_ids) - manager.num_tokens(seq_id))
    manager.end_step()
    manager.check()


def pin(manager: KVCacheManager, pin_id: int, token_ids: list[int], scope: object = None) -> None:
    compute(manager, 1000 + pin_id, token_ids, scope)
    manager.pin(pin_id, 1000 + pin_id)
    manager.free(1000 + pin_id, len(token_ids))
    manager.check()


def match(manager: KVCacheManager, token_ids: list[int], scope: object = None) -> PrefixMatch:
    return manager.match(token_ids, len(token_ids), scope)


def evict_all(manager: KVCacheManager) -> None:
    manager.create(99)
    manager.append(99, manager.num_free_blocks * 4)
    manager.free(99)
    manager.end_step()
    manager.check()


@pytest.mark.parametrize("length", range(1, 14))
def test_pin_is_found_to_its_last_token_after_everything_else_was_evicted(length: int) -> None:
    manager, tokens = make(), list(range(100, 100 + length))
    pin(manager, 1, tokens)
    evict_all(manager)
    found = match(manager, [*tokens, OTHER])
    assert (found.num_tokens, len(found.blocks), found.num_inside) == (length, length // 4, length % 4)
    stats = manager.stats()
    assert (stats.pinned_blocks, stats.used_blocks, stats.cached_blocks) == (-(-length // 4), -(-length // 4), 0)
    assert stats.tail_waste_slots == -length % 4
    assert stats.used_blocks + stats.cached_blocks + stats.free_blocks == 16


def test_prompt_that_is_the_pin_leaves_its_last_token_to_compute() -> None:
    manager = make()
    pin(manager, 1, PREFIX)
    assert match(manager, PREFIX).num_tokens == len(PREFIX) - 1
    assert match(manager, PREFIX[:8]).num_tokens == 7


def test_match_may_end_before_the_tail_does() -> None:
    manager = make()
    pin(manager, 1, PREFIX)
    found = match(manager, [*PREFIX[:9], OTHER, OTHER])
    assert (found.num_tokens, found.num_inside) == (9, 1)
    assert match(manager, [*PREFIX[:7], OTHER]).num_tokens == 7


def test_longest_of_several_tails_is_found() -> None:
    manager = make()
    for pin_id, length in enumerate((9, 11, 10)):
        pin(manager, pin_id, PREFIX[:length])
    pin(manager, 3, [*PREFIX[:8], OTHER])
    assert match(manager, [*PREFIX, OTHER]).num_tokens == 11
    assert match(manager, [*PREFIX[:8], OTHER, OTHER]).num_tokens == 9
    assert manager.pins.num_blocks == 2 + 4


def test_longer_match_in_the_tree_wins() -> None:
    manager = make()
    pin(manager, 1, PREFIX[:9])
    compute(manager, 1, [*PREFIX, 111])
    manager.publish()
    assert match(manager, [*PREFIX, OTHER]).num_tokens == 11


def test_pin_of_the_same_prefix_twice_is_stored_once() -> None:
    manager = make()
    pin(manager, 1, PREFIX)
    pin(manager, 2, PREFIX)
    assert manager.pins.num_blocks == manager.stats().used_blocks == 3
    assert manager.stats().ref_counts["2"] == 3
    assert manager.pins.unpin(1)
    manager.check()
    evict_all(manager)
    assert match(manager, [*PREFIX, OTHER]).num_tokens == 11
    assert manager.pins.unpin(2)
    manager.check()
    assert manager.pins.num_blocks == manager.stats().used_blocks == 0


def test_unpinned_blocks_are_cached_and_the_tail_is_free() -> None:
    manager = make()
    pin(manager, 1, PREFIX)
    assert manager.pins.unpin(1)
    assert not manager.pins.unpin(1)
    manager.check()
    stats = manager.stats()
    assert (stats.used_blocks, stats.cached_blocks, stats.pinned_blocks) == (0, 2, 0)
    assert match(manager, [*PREFIX, OTHER]).num_tokens == 8
    evict_all(manager)
    assert match(manager, [*PREFIX, OTHER]).num_tokens == 0


def test_who_uses_a_pin_goes_on_without_it() -> None:
    manager = make()
    pin(manager, 1, PREFIX)
    compute(manager, 1, [*PREFIX, OTHER])
    table = manager.block_ids(1)
    manager.pins.unpin(1)
    evict_all(manager)
    assert manager.block_ids(1) == table
    assert manager.stats().used_blocks == 3


def test_source_of_a_copy_is_held_when_its_pin_goes_in_the_same_step() -> None:
    manager = make()
    pin(manager, 1, PREFIX)
    prompt = [*PREFIX, OTHER]
    copy = manager.create(1, prompt, None, match(manager, prompt))
    assert copy is not None
    manager.pins.unpin(1)
    manager.check()
    manager.create(2)
    manager.append(2, manager.num_free_blocks * 4)
    assert copy.src not in manager.block_ids(2)
    manager.end_step()
    manager.check()


def test_salts_share_no_pins() -> None:
    manager = make()
    pin(manager, 1, PREFIX[:3], "salt")
    assert match(manager, [*PREFIX[:3], OTHER]).num_tokens == 0
    assert match(manager, [*PREFIX[:3], OTHER], "other").num_tokens == 0
    assert match(manager, [*PREFIX[:3], OTHER], "salt").num_tokens == 3


def test_pin_keeps_what_has_left_the_sliding_window() -> None:
    manager, tokens = make(window=4), list(range(100, 115))
    manager.create(1, tokens, keeps_all=True)
    for count in (5, 5, 5):
        manager.append(1, count)
        manager.end_step()
    manager.pin(1, 1)
    manager.free(1, 15)
    evict_all(manager)
    assert match(manager, [*tokens, OTHER]).num_tokens == 15


def test_what_was_computed_token_by_token_is_found() -> None:
    manager = make()
    manager.create(1, PREFIX)
    for _ in PREFIX:
        manager.append(1, 1)
        manager.end_step()
    manager.pin(1, 1)
    manager.check()
    assert match(manager, [*PREFIX, OTHER]).num_tokens == 11


def test_sequence_goes_on_behind_its_pin() -> None:
    """Its next token goes into a copy of the block that both hold."""
    manager, tokens = make(), PREFIX.copy()
    compute(manager, 1, tokens)
    manager.pin(1, 1)
    tokens.append(OTHER)
    update = manager.append(1, 1)
    assert update is not None
    assert update.copy is not None
    manager.end_step()
    manager.check()
    assert match(manager, [*PREFIX, 8]).num_tokens == 11


def test_check_finds_a_pinned_block_that_cannot_be_found() -> None:
    manager = make()
    pin(manager, 1, PREFIX)
    manager.prefixes._tree.remove(1)
    with pytest.raises(AssertionError, match="is not found"):
        manager.check()


def test_check_finds_a_pin_that_holds_nothing() -> None:
    manager = make()
    pin(manager, 1, PREFIX)
    manager._pool.release(2)
    with pytest.raises(AssertionError):
        manager.check()
