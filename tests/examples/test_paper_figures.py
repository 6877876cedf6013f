"""The figures of Kwon et al. 2023 that show memory, block by block. Block size 4, as in the paper.

The decoding algorithms that lead there are played here with the three verbs that they need: fork, append, free.
"""

import pytest

from quire.cache.block_pool import OutOfBlocksError
from quire.cache.block_table import TableUpdate
from quire.cache.manager import KVCacheManager
from quire.core.config import CacheConfig
from quire.core.plan import BlockCopy
from quire.scheduling.scheduler import make_cache


def cache(num_blocks: int) -> KVCacheManager:
    return make_cache(CacheConfig(num_blocks, block_size=4))


def begin(manager: KVCacheManager, seq_id: int, num_tokens: int) -> None:
    manager.create(seq_id)
    manager.append(seq_id, num_tokens)


def filled(manager: KVCacheManager, seq_id: int) -> list[int]:
    """Filled slots of each logical block: the table's second column in the figure."""
    num_tokens = manager.num_tokens(seq_id)
    return [min(4, num_tokens - start) for start in range(0, num_tokens, 4)]


def ref_counts(manager: KVCacheManager, seq_ids: range) -> dict[int, int]:
    """Owners of each block, counted from the tables that hold it."""
    manager.check()
    tables = [manager.block_ids(seq_id) for seq_id in seq_ids]
    return {block: sum(block in table for table in tables) for table in tables for block in table}


def test_p6_a_prompt_of_seven_and_its_first_two_decodes() -> None:
    manager = cache(num_blocks=9)
    begin(manager, 0, 7)
    assert (len(manager.block_ids(0)), filled(manager, 0)) == (2, [4, 3])

    assert manager.append(0, 1) is None  # the last slot of logical block 1
    assert (len(manager.block_ids(0)), filled(manager, 0)) == (2, [4, 4])

    update = manager.append(0, 1)        # logical block 2 is mapped now
    assert update is not None
    assert (update.first_column, len(update.blocks), update.copy) == (2, 1, None)
    assert (len(manager.block_ids(0)), filled(manager, 0)) == (3, [4, 4, 1])


def test_p8_two_samples_share_a_prompt_until_the_first_write() -> None:
    manager = cache(num_blocks=9)
    begin(manager, 0, 7)
    manager.fork(0, 1)
    assert manager.block_ids(0) == manager.block_ids(1) == [0, 1]
    assert ref_counts(manager, range(2)) == {0: 2, 1: 2}

    assert manager.append(0, 1) == TableUpdate(first_column=1, blocks=[2], copy=BlockCopy(src=1, dst=2))
    assert ref_counts(manager, range(2)) == {0: 2, 1: 1, 2: 1}

    assert manager.append(1, 1) is None  # the last owner writes in place
    assert (manager.block_ids(0), manager.block_ids(1)) == ([0, 2], [0, 1])
    assert manager.stats().copied_blocks == 1


@pytest.mark.parametrize(("num_prompt_tokens", "n", "num_copies"), [(7, 2, 1), (7, 4, 3), (8, 4, 0)])
def test_p8_every_sample_but_the_last_copies_a_partly_filled_block(
    num_prompt_tokens: int, n: int, num_copies: int
) -> None:
    manager = cache(num_blocks=16)
    begin(manager, 0, num_prompt_tokens)
    for child in range(1, n):
        manager.fork(0, child)
    for sequence in range(n):
        manager.append(sequence, 1)
    assert manager.stats().copied_blocks == num_copies


def four_beams(num_blocks: int) -> KVCacheManager:
    """Sequences 0 to 3 as in figure 9: blocks 1 and 2 branch off block 0, block 3 off 1, and 5, 6, 7 off 3."""
    manager = cache(num_blocks)
    begin(manager, 0, 4)         # block 0
    manager.fork(0, 3)
    for _ in range(2):
        manager.append(0, 4)     # blocks 1, 3
        manager.append(3, 4)     # blocks 2, 4
    manager.fork(0, 1)
    manager.fork(0, 2)
    for beam in range(4):
        manager.append(beam, 4)  # blocks 5, 6, 7, 8
    return manager


def test_p9_four_beams_share_what_they_have_in_common() -> None:
    manager = four_beams(num_blocks=16)
    assert [manager.block_ids(beam) for beam in range(4)] == [[0, 1, 3, 5], [0, 1, 3, 6], [0, 1, 3, 7], [0, 2, 4, 8]]
    assert ref_counts(manager, range(4)) == {0: 4, 1: 3, 3: 3, 2: 1, 4: 1, 5: 1, 6: 1, 7: 1, 8: 1}
    assert manager.stats().used_blocks == 9
    assert sum(len(manager.block_ids(beam)) for beam in range(4)) == 16


@pytest.mark.parametrize("num_blocks", [9, 32])
def test_p9_survivors_fork_losers_leave_and_nothing_is_copied(num_blocks: int) -> None:
    """Beams 1 and 2 survive twice each. A pool of exactly 9 suffices: the losers' blocks serve the survivors."""
    manager = four_beams(num_blocks)
    manager.fork(1, 4)
    manager.fork(2, 5)
    for loser in (0, 3):
        manager.free(loser)
    assert manager.num_free_blocks == num_blocks - 9 + len({2, 4, 5, 8})

    survivors = (1, 4, 2, 5)
    new = [manager.append(beam, 4) for beam in survivors]
    assert {block for update in new if update for block in update.blocks} == {2, 4, 5, 8}
    assert [manager.block_ids(beam)[:4] for beam in survivors] == [[0, 1, 3, 6]] * 2 + [[0, 1, 3, 7]] * 2
    owners = {block: sum(block in manager.block_ids(beam) for beam in survivors) for block in range(9)}
    assert owners == {0: 4, 1: 4, 3: 4, 6: 2, 7: 2, 2: 1, 4: 1, 5: 1, 8: 1}
    manager.check()

    unshared = sum(len(manager.block_ids(beam)) for beam in survivors)
    stats = manager.stats()
    assert (stats.used_blocks, unshared, stats.copied_blocks) == (9, 20, 0)
    assert f"{1 - stats.used_blocks / unshared:.0%}" == "55%"


def test_p9_survivors_that_grow_before_the_losers_leave_do_not_fit_into_nine() -> None:
    manager = four_beams(num_blocks=9)
    manager.fork(1, 4)
    with pytest.raises(OutOfBlocksError, match="need 1 blocks, 0 of 9 are free"):
        manager.append(4, 4)


def test_p10_requests_map_onto_a_pinned_prefix_and_copy_its_last_block() -> None:
    """A provider's prefix of 10 tokens is computed once and pinned; two requests add 5 and 6 tokens to it."""
    manager, tokens = cache(num_blocks=16), list(range(100, 110))
    manager.create(0, tokens)
    manager.append(0, 10)
    manager.end_step()
    assert (manager.block_ids(0), filled(manager, 0)) == ([0, 1, 2], [4, 4, 2])
    manager.pin(7, 0)
    manager.free(0)

    for request, num_suffix_tokens, blocks in ((1, 5, [3, 4]), (2, 6, [5, 6])):
        prompt = tokens + [request] * num_suffix_tokens
        copy = manager.create(request, prompt, match=manager.match(prompt, len(prompt)))
        assert copy == BlockCopy(src=2, dst=blocks[0])
        assert manager.num_tokens(request) == 10           # what is left to compute is the suffix
        manager.append(request, num_suffix_tokens)
        manager.end_step()
        assert manager.block_ids(request) == [0, 1, *blocks]
    manager.check()
    assert manager.stats().ref_counts == {"1": 5, "2": 0, "3-4": 2, "5-8": 0, "9+": 0}

    manager.free(1)
    manager.free(2)
    stats = manager.stats()
    assert (stats.used_blocks, stats.pinned_blocks, stats.copied_blocks) == (3, 3, 2)
