"""Worked examples of paged memory, small enough to follow on paper: B is the block size, N the pool's blocks."""

import pytest

from quire.cache.block_pool import BlockPool, OutOfBlocksError
from quire.cache.block_table import BlockTable
from quire.cache.manager import KVCacheManager
from quire.core.config import CacheConfig
from quire.core.errors import ConfigError
from quire.scheduling.scheduler import make_cache

A, B, C = 0, 1, 2  # sequences


def cache(num_blocks: int, block_size: int) -> KVCacheManager:
    return make_cache(CacheConfig(num_blocks, block_size))


def begin(manager: KVCacheManager, seq_id: int, num_tokens: int) -> None:
    manager.create(seq_id)
    manager.append(seq_id, num_tokens)


def begin_forked(manager: KVCacheManager, num_tokens: int, num_sequences: int) -> None:
    """Sequences 0 .. num_sequences - 1 over one prompt."""
    begin(manager, 0, num_tokens)
    for child in range(1, num_sequences):
        manager.fork(0, child)


def free_used_shared_sequences(manager: KVCacheManager) -> tuple[int, int, int, int]:
    manager.check()
    stats = manager.stats()
    return stats.free_blocks, stats.used_blocks, stats.shared_blocks, stats.num_sequences


def test_t1_five_tokens_take_two_blocks_of_four() -> None:
    pool = BlockPool(20)
    a, b = BlockTable(pool, block_size=4), BlockTable(pool, block_size=4)
    a.append(5)
    first = a.locate(0)[0]
    assert [a.locate(position) for position in range(4)] == [(first, 0), (first, 1), (first, 2), (first, 3)]
    assert a.locate(4)[0] != first
    assert a.locate(4)[1] == 0

    b.append(1)
    assert b.locate(0)[0] not in a.blocks
    assert pool.num_free_blocks == 17
    a.free()
    assert pool.num_free_blocks == 19


def test_t2_mistakes_are_named_and_change_nothing() -> None:
    for size in (0, -1):
        with pytest.raises(ValueError, match="num_blocks"):
            BlockPool(size)
        with pytest.raises(ValueError, match="block_size"):
            BlockTable(BlockPool(1), size)
        with pytest.raises(ConfigError, match="num_kv_blocks"):
            cache(size, 4)
        with pytest.raises(ConfigError, match="block_size"):
            cache(4, size)

    manager = cache(2, 4)
    begin(manager, A, 8)
    with pytest.raises(ValueError, match="sequence 0 already has a block table"):
        manager.create(A)
    with pytest.raises(ValueError, match="sequence 1 has no block table"):
        manager.append(B, 1)
    with pytest.raises(OutOfBlocksError, match="need 1 blocks, 0 of 2 are free"):
        manager.append(A, 1)
    assert (manager.block_ids(A), manager.num_tokens(A)) == ([0, 1], 8)
    assert free_used_shared_sequences(manager) == (0, 2, 0, 1)


def test_t3_position_to_block_and_offset() -> None:
    pool = BlockPool(20)
    pool.allocate(20)
    for block in (5, 18, 19):  # what is freed last is handed out first
        pool.release(block)
    table = BlockTable(pool, block_size=4)
    table.append(12)
    assert table.blocks == [19, 18, 5]
    assert [table.locate(position) for position in (0, 3, 4, 8, 10)] == [(19, 0), (19, 3), (18, 0), (5, 0), (5, 2)]
    with pytest.raises(IndexError, match="position 12"):
        table.locate(12)


def test_t4_unused_slots_stay_below_one_block() -> None:
    for num_tokens, num_slots in ((505, 512), (1000, 1008), (4096, 4096)):
        manager = cache(256, 16)
        begin(manager, A, num_tokens)
        assert 16 * manager.blocks_for(num_tokens) == 16 * manager.stats().used_blocks == num_slots
        assert manager.stats().tail_waste_slots == num_slots - num_tokens
    manager = cache(256, 16)
    manager.create(A)
    for _ in range(4096):
        manager.append(A, 1)
        assert manager.stats().tail_waste_slots < 16


def test_t5_a_newcomer_fits_where_another_left() -> None:
    manager = cache(4, 16)
    begin(manager, A, 48)
    begin(manager, B, 5)
    assert manager.stats().used_blocks == 4
    manager.free(A)
    begin(manager, C, 30)
    assert manager.stats().used_blocks == 3


def test_t6_fork_and_append_counts() -> None:
    for num_tokens, used_after in ((10, 8), (17, 12), (32, 12)):
        manager = cache(64, 16)
        begin(manager, A, 64)
        assert free_used_shared_sequences(manager) == (60, 4, 0, 1)
        assert manager.block_ids(A) == [0, 1, 2, 3]

        for child in (1, 2, 3):
            manager.fork(A, child)
        assert free_used_shared_sequences(manager) == (60, 4, 4, 4)
        assert manager.stats().ref_counts["3-4"] == 4

        for sequence in range(4):
            manager.append(sequence, num_tokens)
        assert free_used_shared_sequences(manager) == (64 - used_after, used_after, 4, 4)
        assert manager.stats().copied_blocks == 0  # the prompt ends at a border

        for sequence in range(4):
            manager.free(sequence)
        assert free_used_shared_sequences(manager) == (64, 0, 0, 0)


def test_t7_sharing_saves_one_block_per_owner_but_the_first() -> None:
    manager = cache(64, 16)
    begin_forked(manager, 64, num_sequences=4)
    for sequence in range(4):
        manager.append(sequence, 10)
    unshared = sum(manager.blocks_for(manager.num_tokens(sequence)) for sequence in range(4))
    owners = [sum(block in manager.block_ids(sequence) for sequence in range(4)) for block in range(8)]
    assert unshared == 4 * 5
    assert owners == [4, 4, 4, 4, 1, 1, 1, 1]
    assert manager.stats().used_blocks == unshared - sum(count - 1 for count in owners) == 8


def test_t8_a_prompt_shared_by_four_beams_is_stored_once() -> None:
    manager = cache(64, 16)
    begin_forked(manager, 256, num_sequences=4)
    assert manager.stats().used_blocks == 16
    assert 4 * manager.blocks_for(256) == 64

    manager = cache(128, 16)
    begin(manager, A, 2048)
    assert len(manager.block_ids(A)) == 128


def test_t9_all_or_nothing_and_copy_on_write() -> None:
    manager = cache(4, 16)
    manager.create(A)
    with pytest.raises(OutOfBlocksError, match="need 5 blocks, 4 of 4 are free"):
        manager.append(A, 80)
    assert (manager.num_tokens(A), manager.block_ids(A), manager.num_free_blocks) == (0, [], 4)

    pool = BlockPool(4)
    a = BlockTable(pool, block_size=4)
    a.append(7)
    b = a.fork()
    updates = [a.append(1), b.append(1)]
    assert [update is not None and update.copy is not None for update in updates] == [True, False]
    assert a.locate(7) != b.locate(7)
    assert a.locate(3) == b.locate(3)


def test_live_lengths_of_four_requests_fill_99_6_percent_of_their_slots() -> None:
    manager = cache(512, 16)
    for sequence, num_tokens in enumerate((600, 1250, 4000, 128)):
        begin(manager, sequence, num_tokens)
    stats = manager.stats()
    assert (stats.used_blocks, stats.tail_waste_slots) == (375, 22)
    assert f"{1 - stats.tail_waste_ratio:.1%}" == "99.6%"


def test_hundred_requests_with_the_same_thousand_tokens_share_all_but_their_tails() -> None:
    manager = cache(6300, 16)
    begin_forked(manager, 1000, num_sequences=100)
    assert manager.stats().used_blocks == manager.blocks_for(1000) == 63
    for sequence in range(100):
        manager.append(sequence, 1)
    assert manager.stats().used_blocks == 62 + 100
    assert f"{1 - manager.stats().used_blocks / (100 * 63):.1%}" == "97.4%"
