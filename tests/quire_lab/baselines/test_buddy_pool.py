"""Contiguous runs: where they stand, what rounding costs, and that nothing is lost over random calls."""

import random

import pytest

from quire.cache.block_pool import OutOfBlocksError
from quire_lab.baselines.buddy_pool import BuddyPool


def free_run(pool: BuddyPool, run: list[int]) -> None:
    for block in reversed(run):
        pool.release(block)


def test_a_run_stands_in_the_smallest_power_of_two_that_holds_it() -> None:
    pool = BuddyPool(16)
    assert pool.allocate(5) == [0, 1, 2, 3, 4]
    assert pool.num_free_blocks == 8
    assert pool.allocate(2) == [8, 9]
    assert pool.allocate(4) == [12, 13, 14, 15], "the smallest chunk that holds it"
    pool.check()


def test_two_free_buddies_become_one_chunk() -> None:
    pool = BuddyPool(8)
    runs = [pool.allocate(1) for _ in range(8)]
    assert runs == [[block] for block in range(8)]
    for run in runs[:4] + runs[5:]:
        free_run(pool, run)
        pool.check()
    assert pool.num_runs(4) == 1
    assert pool.num_runs(2) == 3
    free_run(pool, runs[4])
    assert pool.allocate(8) == list(range(8))


def test_a_pool_that_is_no_power_of_two_is_used_to_its_end() -> None:
    pool = BuddyPool(7)
    assert [pool.num_runs(length, when_empty=True) for length in (1, 2, 3, 4, 5)] == [7, 3, 1, 1, 0]
    assert [pool.allocate(4), pool.allocate(2), pool.allocate(1)] == [[0, 1, 2, 3], [4, 5], [6]]
    assert pool.num_free_blocks == 0
    with pytest.raises(OutOfBlocksError, match="no chunk of 1 blocks"):
        pool.allocate(1)


def test_the_papers_pool_holds_seven_longest_sequences() -> None:
    blocks = 15_700 // 16
    assert BuddyPool(blocks).num_runs(2048 // 16, when_empty=True) == 7


def test_want_of_a_chunk_changes_nothing_although_enough_blocks_are_free() -> None:
    pool = BuddyPool(4)
    runs = [pool.allocate(1) for _ in range(4)]
    free_run(pool, runs[0])
    free_run(pool, runs[2])
    with pytest.raises(OutOfBlocksError, match="2 of 4 are free"):
        pool.allocate(2)
    assert pool.num_free_blocks == 2
    pool.check()


def test_a_chunk_is_free_when_the_last_owner_of_its_run_goes() -> None:
    pool = BuddyPool(4)
    run = pool.allocate(3)
    pool.share(run[1])
    free_run(pool, run)
    assert pool.num_free_blocks == 0
    pool.check()
    pool.release(run[1])
    assert pool.num_free_blocks == 4
    pool.check()


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_keep_every_block_in_one_chunk(seed: int) -> None:
    rng = random.Random(seed)
    pool, runs = BuddyPool(rng.randint(1, 100)), list[list[int]]()
    for _ in range(200):
        length = rng.randint(1, 2 + pool.num_blocks // rng.choice([1, 4, 16]))
        if rng.random() < 0.6:
            possible = pool.num_runs(length)
            try:
                runs.append(pool.allocate(length))
                assert possible > 0
            except OutOfBlocksError:
                assert possible == 0
        elif runs:
            free_run(pool, runs.pop(rng.randrange(len(runs))))
        pool.check()
        held = [block for run in runs for block in run]
        assert len(set(held)) == len(held)
        assert sum(1 << (len(run) - 1).bit_length() for run in runs) == pool.num_blocks - pool.num_free_blocks
    for run in runs:
        free_run(pool, run)
    assert pool.num_free_blocks == pool.num_blocks
    assert pool.num_runs(1) == pool.num_blocks
