"""Truncation: computed tokens are taken back with their blocks, their nodes of the prefix tree and their swap blocks.

The random lives of test_prefix_machine.py truncate, too, against a memory of digests.
"""

from array import array

import pytest

from quire.cache.manager import KVCacheManager
from quire.core.config import CacheConfig
from quire.scheduling import scheduler

TOKENS = list(range(100, 116))
SIZE = 4


def make_cache(num_blocks: int = 16, window: int | None = None, num_swap_blocks: int = 0) -> KVCacheManager:
    return scheduler.make_cache(CacheConfig(num_blocks, SIZE, window, True, num_swap_blocks))


def compute(cache: KVCacheManager, seq_id: int, token_ids: list[int]) -> list[int]:
    """Compute the tokens of a new sequence in one step, with what the cache has of them. Returns its token list."""
    owned = token_ids.copy()
    cache.create(seq_id, owned, None, cache.match(owned, len(owned)))
    cache.append(seq_id, len(owned) - cache.num_tokens(seq_id))
    cache.end_step()
    cache.check()
    return owned


def num_found(cache: KVCacheManager, token_ids: list[int]) -> int:
    return cache.match([*token_ids, 1], len(token_ids) + 1).num_tokens


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(16, 4), (13, 4), (12, 3), (5, 2), (4, 1), (0, 0)])
def test_blocks_behind_are_free_and_found_no_more(num_tokens: int, num_blocks: int) -> None:
    cache = make_cache()
    owned = compute(cache, 0, TOKENS)
    cache.truncate(0, num_tokens)
    cache.check()
    assert (cache.num_tokens(0), len(cache.block_ids(0))) == (num_tokens, num_blocks)
    assert (cache.num_free_blocks, cache.stats().cached_blocks) == (16 - num_blocks, 0)
    del owned[num_tokens:]
    assert num_found(cache, TOKENS) == num_tokens // SIZE * SIZE
    owned.append(7)
    cache.append(0, 1)
    cache.end_step()
    cache.free(0, num_tokens + 1)
    cache.check()
    assert num_found(cache, owned) == (num_tokens + 1) // SIZE * SIZE


def test_block_shared_with_a_fork_is_copied_before_it_is_written() -> None:
    cache = make_cache()
    owned = compute(cache, 0, TOKENS[:8])
    cache.fork(0, 1, owned.copy())
    cache.truncate(1, 6)
    cache.check()
    shared = cache.block_ids(0)
    update = cache.append(1, 1)
    assert update is not None
    assert (update.first_column, update.copy) == (1, (shared[1], cache.block_ids(1)[1]))
    assert cache.block_ids(0) == shared
    cache.end_step()
    cache.check()


def test_fork_that_loses_its_partner_writes_in_place() -> None:
    cache = make_cache()
    owned = compute(cache, 0, TOKENS[:7])
    cache.fork(0, 1, owned.copy())
    cache.truncate(1, 6)
    cache.free(0)
    assert cache.append(1, 1) is None


def cached_child(num_blocks: int) -> tuple[KVCacheManager, list[int]]:
    """Return a cache with a sequence of 8 tokens that is cut to 6 in a block below which another is cached."""
    cache = make_cache(num_blocks)
    compute(cache, 0, TOKENS[:12])
    cache.free(0, 12)
    owned = compute(cache, 1, [*TOKENS[:8], 7])
    cache.truncate(1, 6)
    cache.check()
    del owned[6:]
    owned += [8, 8, 8]
    return cache, owned


def test_block_that_the_tree_still_needs_is_copied_before_it_is_written() -> None:
    cache, _ = cached_child(16)
    found = cache.block_ids(1)[1]
    update = cache.append(1, 1)
    assert update is not None
    assert update.copy is not None
    assert update.copy.src == found
    cache.end_step()
    cache.check()
    assert num_found(cache, TOKENS[:12]) == 12


def test_source_of_a_copy_is_not_evicted_in_the_same_step() -> None:
    cache, _ = cached_child(5)
    update = cache.append(1, 1)
    assert update is not None
    assert update.copy is not None
    cache.create(2)
    cache.append(2, cache.num_free_blocks * SIZE)
    assert update.copy.src not in cache.block_ids(2)
    cache.end_step()
    cache.check()


def test_copy_of_a_cut_block_can_be_retracted() -> None:
    cache, _ = cached_child(16)
    before = cache.block_ids(1)
    cache.append(1, 1)
    cache.retract(1, 6)
    assert cache.block_ids(1) == before
    cache.end_step()
    cache.check()
    update = cache.append(1, 1)
    assert update is not None
    assert update.copy is not None, "it is still cut"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_cut_outlasts_a_write_that_is_retracted(order: tuple[int, int]) -> None:
    """The fork copies the block, so the cut table writes in place; when both are taken back they share it again."""
    cache = make_cache(num_swap_blocks=8)
    owned = compute(cache, 0, TOKENS[:3])
    cache.fork(0, 1, owned.copy())
    cache.truncate(0, 1)
    for seq_id in (1, 0):
        cache.append(seq_id, 1)
    num_tokens = {0: 1, 1: 3}
    for seq_id in order:
        cache.retract(seq_id, num_tokens[seq_id])
    cache.end_step()
    cache.check()
    assert cache.block_ids(0) == cache.block_ids(1)
    cache.append(0, 1)
    assert cache.block_ids(0) != cache.block_ids(1), "wrote into the block of the fork"


def test_last_append_can_be_taken_back_in_a_window_and_no_block_that_is_gone() -> None:
    cache = make_cache(window=5)
    owned = compute(cache, 0, TOKENS[:12])
    owned += [1, 1, 1]
    cache.append(0, 3)                                      # gives up what is before position 8
    cache.end_step()
    with pytest.raises(ValueError, match="cannot keep 11 of 15 tokens, 2 blocks left the window"):
        cache.truncate(0, 11)
    assert cache.num_tokens(0) == 15
    cache.truncate(0, 12)
    cache.check()
    assert cache.num_tokens(0) == 12


def test_stored_token_that_was_to_be_computed_once_more_goes_too() -> None:
    """A prompt that is found whole lacks only the logits of its last token, whose block it has already."""
    cache = make_cache()
    compute(cache, 0, TOKENS[:8])
    shared = cache.block_ids(0)
    owned = TOKENS[:8]
    cache.create(1, owned, None, cache.match(owned, 8))
    assert (cache.num_tokens(1), cache.block_ids(1)) == (7, shared)
    cache.truncate(1, 7)
    cache.check()
    owned[-1] = 7
    cache.append(1, 1)
    assert cache.block_ids(1)[-1] not in shared, "another token in a block that others read"
    cache.end_step()
    cache.free(1, 8)
    cache.check()
    assert num_found(cache, owned) == num_found(cache, TOKENS[:8]) == 8


@pytest.mark.parametrize("num_tokens", [-1, 9])
def test_more_tokens_than_there_are_cannot_stay(num_tokens: int) -> None:
    cache = make_cache()
    compute(cache, 0, TOKENS[:8])
    with pytest.raises(ValueError, match=f"cannot keep {num_tokens} of 8 tokens"):
        cache.truncate(0, num_tokens)
    cache.check()


def test_swapped_sequence_gives_up_swap_blocks() -> None:
    cache = make_cache(num_swap_blocks=4)
    compute(cache, 0, TOKENS)
    cache.swap.swap_out([0])
    cache.end_step()
    cache.truncate(0, 6)
    cache.check()
    assert cache.swap_space.num_free_blocks == 2
    cache.swap.swap_in([0])
    cache.end_step()
    cache.check()
    assert (cache.num_tokens(0), len(cache.block_ids(0))) == (6, 2)


def test_columns_stay_an_array_that_can_grow() -> None:
    cache = make_cache()
    compute(cache, 0, TOKENS)
    cache.truncate(0, 3)
    assert isinstance(cache._tables[0].columns, array)
    cache.append(0, 9)
    assert len(cache.block_ids(0)) == 3
