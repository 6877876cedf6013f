"""One chunk per sequence behind the manager's interface: reservations, copying forks, and waste that is counted."""

import random

import pytest

from quire.cache.block_pool import OutOfBlocksError
from quire.cache.manager import KVCacheManager
from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.plan import BlockCopy
from quire.scheduling.scheduler import make_scheduler
from quire_lab.baselines.buddy_pool import ContiguousManager


def make_cache(num_blocks: int = 16, block_size: int = 4) -> ContiguousManager:
    return ContiguousManager(CacheConfig(num_blocks, block_size, memory_policy="contiguous-oracle"))


def test_the_policy_chooses_the_manager() -> None:
    config = SchedulerConfig(1, 16, 16)
    assert type(make_scheduler(config, CacheConfig(4)).cache) is KVCacheManager
    assert type(make_scheduler(config, CacheConfig(4, memory_policy="contiguous-max")).cache) is ContiguousManager


def test_a_sequence_has_all_its_blocks_in_a_row_from_the_start() -> None:
    cache = make_cache()
    cache.create(0, num_reserved=17)
    assert cache.block_ids(0) == [0, 1, 2, 3, 4]
    assert cache.num_free_blocks == 8, "five blocks stand in a chunk of eight"
    assert cache.append(0, 10) is None, "no column changes"
    assert cache.append(0, 7) is None
    assert cache.num_tokens(0) == 17
    cache.check()
    cache.free(0)
    assert cache.num_free_blocks == 16


def test_what_is_reserved_and_rounded_up_counts_as_waste() -> None:
    cache = make_cache()
    cache.create(0, num_reserved=17)
    cache.append(0, 6)
    stats = cache.stats()
    assert (stats.used_blocks, stats.free_blocks, stats.tail_waste_slots) == (8, 8, 8 * 4 - 6)
    owners = [(entry.block, owner.filled) for entry in cache.view_blocks(0, 16) for owner in entry.owners]
    assert owners == [(0, 4), (1, 2), (2, 0), (3, 0), (4, 0)]


def test_no_chunk_no_sequence() -> None:
    cache = make_cache(num_blocks=6)
    cache.create(0, num_reserved=16)
    assert [cache.num_chunks(8), cache.num_chunks(9), cache.num_chunks(8, when_empty=True)] == [1, 0, 3]
    with pytest.raises(OutOfBlocksError):
        cache.create(1, num_reserved=9)
    with pytest.raises(ValueError, match="already has a block table"):
        cache.create(0, num_reserved=1)
    cache.check()


def test_a_fork_copies_what_is_filled_in_the_next_step() -> None:
    cache = make_cache()
    cache.create(0, num_reserved=16)
    cache.append(0, 6)
    cache.fork(0, 1)
    assert (cache.block_ids(1), cache.num_tokens(1)) == ([4, 5, 6, 7], 6)
    cache.check()
    assert cache.take_copies() == [BlockCopy(0, 4), BlockCopy(1, 5)]
    assert cache.take_copies() == []
    assert cache.stats().copied_blocks == 2
    assert cache.stats().shared_blocks == 0


def test_a_source_is_kept_until_its_copies_are_handed_over() -> None:
    cache = make_cache(num_blocks=4)
    cache.create(0, num_reserved=8)
    cache.append(0, 5)
    cache.fork(0, 1)
    cache.free(0)
    cache.check()
    assert cache.num_free_blocks == 0, "else somebody could take it, and write before it is read"
    cache.take_copies()
    assert cache.num_free_blocks == 2
    cache.free(1)
    assert cache.num_free_blocks == 4


def test_copies_into_a_sequence_that_has_ended_are_not_made() -> None:
    cache = make_cache()
    cache.create(0, num_reserved=8)
    cache.append(0, 5)
    cache.fork(0, 1)
    cache.free(1)
    cache.check()
    assert cache.take_copies() == []
    cache.free(0)
    assert cache.num_free_blocks == 16


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_keep_every_invariant_and_every_token(seed: int) -> None:
    rng = random.Random(seed)
    cache, size = make_cache(rng.randint(1, 60), rng.choice([1, 3, 4])), 0
    size = cache.block_size
    content: dict[int, list[int]] = {}         # what each sequence has written
    memory: dict[tuple[int, int], int] = {}    # slot -> token
    reserved: dict[int, int] = {}
    for number in range(300):
        match rng.choice(["create", "append", "append", "fork", "free", "step"]):
            case "create":
                num_tokens = rng.randint(1, cache.num_blocks * size)
                if cache.num_chunks(num_tokens):
                    cache.create(number, num_reserved=num_tokens)
                    content[number], reserved[number] = [], num_tokens
            case "append" if content:
                seq_id = rng.choice(list(content))
                for token in range(rng.randint(0, reserved[seq_id] - len(content[seq_id]))):
                    cache.append(seq_id, 1)
                    memory[cache.block_ids(seq_id)[len(content[seq_id]) // size], len(content[seq_id]) % size] = token
                    content[seq_id].append(token)
            case "fork" if content:
                parent = rng.choice(list(content))
                if cache.num_chunks(len(cache.block_ids(parent)) * size):
                    cache.fork(parent, number)
                    content[number], reserved[number] = content[parent].copy(), reserved[parent]
            case "free" if content:
                seq_id = rng.choice(list(content))
                del content[seq_id]
                cache.free(seq_id)
            case _:
                pass
        cache.check()
        old = memory.copy()                    # copies of one step read what was there before it
        for src, dst in cache.take_copies():
            memory |= {(dst, offset): old[src, offset] for offset in range(size) if (src, offset) in old}
        for seq_id, tokens in content.items():
            blocks = cache.block_ids(seq_id)
            assert [memory[blocks[i // size], i % size] for i in range(len(tokens))] == tokens
    for seq_id in content:
        cache.free(seq_id)
    cache.take_copies()
    cache.check()
    assert cache.num_free_blocks == cache.num_blocks


def test_truncated_sequence_keeps_its_chunk() -> None:
    cache = make_cache()
    cache.create(0, num_reserved=16)
    cache.append(0, 9)
    cache.truncate(0, 2)
    cache.check()
    assert (cache.num_tokens(0), len(cache.block_ids(0))) == (2, 4)
    cache.append(0, 14)
    cache.check()
