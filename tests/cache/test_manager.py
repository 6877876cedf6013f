"""KVCacheManager: sequences by id over one pool; windows, worst cases and figures."""

import random

import pytest

from quire.cache.block_pool import OutOfBlocksError
from quire.cache.block_table import NULL_BLOCK, TableUpdate, worst_case_blocks
from quire.cache.manager import KVCacheManager
from quire.core.config import CacheConfig
from quire.core.plan import BlockCopy
from quire.scheduling.scheduler import make_cache


def make(num_blocks: int = 8, block_size: int = 4, sliding_window: int | None = None) -> KVCacheManager:
    return make_cache(CacheConfig(num_blocks, block_size, sliding_window))


def begin(manager: KVCacheManager, seq_id: int, num_tokens: int) -> None:
    manager.create(seq_id)
    manager.append(seq_id, num_tokens)


class TestLife:
    def test_create_append_free(self) -> None:
        manager = make()
        manager.create(7)
        assert (manager.num_tokens(7), manager.block_ids(7), manager.num_free_blocks) == (0, [], 8)
        assert manager.append(7, 5) == TableUpdate(0, [0, 1], None)
        assert (manager.num_tokens(7), manager.block_ids(7), manager.num_free_blocks) == (5, [0, 1], 6)
        manager.check()
        manager.free(7)
        assert manager.num_free_blocks == 8
        manager.check()

    def test_size_is_known_from_outside(self) -> None:
        manager = make(num_blocks=9, block_size=3)
        assert (manager.num_blocks, manager.block_size, manager.num_free_blocks) == (9, 3, 9)

    def test_id_may_be_used_again_after_free(self) -> None:
        manager = make()
        begin(manager, 1, 4)
        manager.free(1)
        begin(manager, 1, 4)
        assert manager.block_ids(1) == [0]

    def test_taken_id_is_refused(self) -> None:
        manager = make()
        begin(manager, 1, 3)
        begin(manager, 2, 3)
        with pytest.raises(ValueError, match="sequence 1 already has a block table"):
            manager.create(1)
        with pytest.raises(ValueError, match="sequence 2 already has a block table"):
            manager.fork(1, 2)
        assert manager.num_tokens(1) == 3
        manager.check()

    def test_unknown_id_is_refused_by_every_verb(self) -> None:
        manager = make()
        begin(manager, 1, 3)
        for verb in (
            lambda: manager.append(5, 1),
            lambda: manager.append_where_room([1, 5]),
            lambda: manager.free(5),
            lambda: manager.fork(5, 6),
            lambda: manager.block_ids(5),
            lambda: manager.num_tokens(5),
        ):
            with pytest.raises(ValueError, match="sequence 5 has no block table"):
                verb()
        manager.create(6)  # the failed fork took no id
        manager.check()

    def test_freed_twice_is_refused(self) -> None:
        manager = make()
        begin(manager, 1, 3)
        manager.free(1)
        with pytest.raises(ValueError, match="sequence 1 has no block table"):
            manager.free(1)

    def test_block_ids_are_a_copy(self) -> None:
        manager = make()
        begin(manager, 1, 3)
        manager.block_ids(1).clear()
        assert manager.block_ids(1) == [0]

    def test_fork_shares_until_the_first_write(self) -> None:
        manager = make()
        begin(manager, 1, 6)
        manager.fork(1, 2)
        assert manager.block_ids(2) == manager.block_ids(1) == [0, 1]
        assert manager.append(2, 1) == TableUpdate(1, [2], BlockCopy(1, 2))
        assert manager.append(1, 1) is None
        manager.check()

    def test_one_token_each_where_no_table_changes(self) -> None:
        manager = make()
        for seq_id, num_tokens in enumerate((3, 4, 1, 0)):
            begin(manager, seq_id, num_tokens)
        manager.fork(2, 4)
        assert manager.append_where_room([0, 1, 4, 3]) == ([1, 2, 3], {}), "full, shared, empty"
        assert [manager.num_tokens(seq_id) for seq_id in range(5)] == [4, 4, 1, 0, 1]
        manager.check()

    @pytest.mark.parametrize("freed", [0, 1, 2])
    def test_blocks_of_full_tables_are_those_of_single_appends(self, freed: int) -> None:
        managers = make(num_blocks=12), make(num_blocks=12)
        for manager in managers:
            for seq_id, num_tokens in enumerate((4, 3, 0, 8, 4, 4)):
                begin(manager, seq_id, num_tokens)
            for seq_id in range(4, 4 + freed):
                manager.free(seq_id)
        at_once, one_by_one = managers
        updates = {seq_id: one_by_one.append(seq_id, 1) for seq_id in range(4)}
        assert at_once.append_where_room(range(4)) == ([], {key: each for key, each in updates.items() if each})
        assert [at_once.block_ids(each) for each in range(4)] == [one_by_one.block_ids(each) for each in range(4)]
        at_once.check()

    def test_too_few_blocks_for_all_full_tables_leave_them_as_they_are(self) -> None:
        manager = make(num_blocks=4)
        for seq_id, num_tokens in enumerate((4, 3, 8)):
            begin(manager, seq_id, num_tokens)
        manager.free(0)
        begin(manager, 3, 4)
        assert manager.append_where_room([1, 2, 3]) == ([1, 2], {})
        assert [manager.num_tokens(seq_id) for seq_id in (1, 2, 3)] == [4, 8, 4]
        manager.check()

    def test_out_of_blocks_changes_nothing(self) -> None:
        manager = make(num_blocks=2)
        begin(manager, 1, 6)
        manager.create(2)
        for seq_id, count in ((1, 3), (2, 1)):
            with pytest.raises(OutOfBlocksError):
                manager.append(seq_id, count)
        assert (manager.block_ids(1), manager.num_tokens(1), manager.num_tokens(2)) == ([0, 1], 6, 0)
        manager.check()
        manager.append(1, 2)


class TestWorstCase:
    @pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (400, 100)])
    def test_blocks_for_rounds_up(self, num_tokens: int, num_blocks: int) -> None:
        assert make().blocks_for(num_tokens) == num_blocks

    @pytest.mark.parametrize(
        ("num_prompt_tokens", "max_tokens", "n", "num_blocks"),
        [(7, 1, 1, 2), (7, 2, 1, 3), (7, 1, 4, 1 + 4), (8, 1, 4, 2 + 4), (1, 1, 3, 3), (8, 0, 5, 2)],
    )
    def test_only_full_prompt_blocks_stay_shared(
        self, num_prompt_tokens: int, max_tokens: int, n: int, num_blocks: int
    ) -> None:
        assert worst_case_blocks(num_prompt_tokens, max_tokens, n, 4) == num_blocks

    @pytest.mark.parametrize("seed", range(50))
    def test_worst_case_is_reached_and_never_passed(self, seed: int) -> None:
        rng = random.Random(seed)
        prompt, output, n, block_size = rng.randint(1, 40), rng.randint(1, 40), rng.randint(1, 6), rng.randint(1, 9)
        num_blocks = worst_case_blocks(prompt, output, n, block_size)
        manager = make(num_blocks, block_size)
        begin(manager, 0, prompt)
        for branch in range(1, n):
            manager.fork(0, branch)
        turns = [branch for branch in range(n) for _ in range(output)]
        rng.shuffle(turns)
        for branch in turns:
            manager.append(branch, 1)
            manager.check()
        assert manager.num_free_blocks == 0


class TestSlidingWindow:
    def test_block_goes_when_no_later_query_can_see_it(self) -> None:
        """Window 3: the query at position L sees L - 2 to L. Block 0, positions 0 to 3, is needed up to L = 5."""
        manager = make(sliding_window=3)
        begin(manager, 1, 5)
        manager.append(1, 1)  # position 5
        assert manager.block_ids(1) == [0, 1]
        assert manager.append(1, 1) is None  # position 6
        assert manager.block_ids(1) == [NULL_BLOCK, 1]
        assert manager.num_free_blocks == 7
        manager.check()

    def test_released_block_serves_the_same_append(self) -> None:
        manager = make(num_blocks=2, sliding_window=2)
        begin(manager, 1, 8)
        assert manager.append(1, 1) == TableUpdate(2, [0], None)
        assert manager.block_ids(1) == [NULL_BLOCK, 1, 0]
        manager.check()

    def test_window_of_one_keeps_the_last_block_only(self) -> None:
        manager = make(num_blocks=1, sliding_window=1)
        manager.create(1)
        for _ in range(30):
            manager.append(1, 1)
            manager.check()
        assert manager.block_ids(1) == [NULL_BLOCK] * 7 + [0]

    def test_chunk_keeps_all_that_its_first_query_sees(self) -> None:
        manager = make(num_blocks=16, sliding_window=6)
        begin(manager, 1, 10)
        manager.append(1, 20)  # the query at position 10 sees 5 to 10
        assert manager.block_ids(1)[:2] == [NULL_BLOCK, 1]
        manager.check()

    def test_endless_sequence_needs_only_its_window(self) -> None:
        """Window w over blocks of b: at most ceil((w - 1) / b) + 1 blocks are in use."""
        manager = make(num_blocks=4, sliding_window=12)
        manager.create(1)
        for _ in range(500):
            manager.append(1, 1)
            manager.check()
        assert manager.num_tokens(1) == 500

    def test_branches_drop_their_shares_one_by_one(self) -> None:
        manager = make(sliding_window=2)
        begin(manager, 1, 5)
        manager.fork(1, 2)
        manager.append(1, 1)
        assert manager.block_ids(1) == [NULL_BLOCK, 2]
        assert manager.block_ids(2) == [0, 1]
        manager.append(2, 1)
        assert manager.block_ids(2) == [NULL_BLOCK, 1]
        assert manager.num_free_blocks == 6
        manager.check()


class TestStats:
    def test_empty_cache(self) -> None:
        stats = make().stats()
        assert (stats.total_blocks, stats.free_blocks, stats.used_blocks, stats.cached_blocks) == (8, 8, 0, 0)
        assert (stats.block_size, stats.num_sequences, stats.copied_blocks) == (4, 0, 0)
        assert (stats.tail_waste_ratio, stats.usage) == (0.0, 0.0)
        assert stats.ref_counts == {"1": 0, "2": 0, "3-4": 0, "5-8": 0, "9+": 0}

    def test_shared_blocks_and_their_empty_slots_count_once(self) -> None:
        manager = make()
        begin(manager, 1, 6)
        manager.fork(1, 2)
        stats = manager.stats()
        assert (stats.used_blocks, stats.shared_blocks, stats.num_sequences) == (2, 2, 2)
        assert stats.tail_waste_slots == 2
        assert stats.tail_waste_ratio == 2 / 8
        assert stats.usage == 2 / 8

    def test_waste_is_what_private_last_blocks_lack(self) -> None:
        manager = make()
        for seq_id, num_tokens in enumerate((1, 4, 6, 0)):
            begin(manager, seq_id, num_tokens)
        assert manager.stats().tail_waste_slots == 3 + 0 + 2

    def test_dropped_blocks_waste_nothing(self) -> None:
        manager = make(sliding_window=1)
        begin(manager, 1, 8)
        manager.append(1, 0)
        assert manager.block_ids(1) == [NULL_BLOCK, NULL_BLOCK]
        assert (manager.stats().used_blocks, manager.stats().tail_waste_slots) == (0, 0)

    def test_copies_are_counted_since_start(self) -> None:
        manager = make()
        begin(manager, 0, 6)
        for child in (1, 2):
            manager.fork(0, child)
        for seq_id in range(3):
            manager.append(seq_id, 1)
            manager.free(seq_id)
        assert manager.stats().copied_blocks == 2

    def test_owners_are_counted_in_octaves(self) -> None:
        manager = make(num_blocks=64, block_size=1)
        seq_id = 0
        for num_owners in range(1, 11):
            begin(manager, seq_id, 1)
            for child in range(seq_id + 1, seq_id + num_owners):
                manager.fork(seq_id, child)
            seq_id += num_owners
        assert manager.stats().ref_counts == {"1": 1, "2": 1, "3-4": 2, "5-8": 4, "9+": 2}


class TestRefork:
    """A sequence that ends and begins again as a fork of another, as beams do in every step."""

    def test_is_a_free_and_a_fork(self) -> None:
        one, two = make(num_blocks=16), make(num_blocks=16)
        for manager in (one, two):
            begin(manager, 1, 8)
            manager.fork(1, 2)
            manager.append(1, 1)
            manager.append(2, 6)
        one.refork(2, 1)
        two.free(1)
        two.fork(2, 1)
        assert [one.block_ids(seq_id) for seq_id in (1, 2)] == [two.block_ids(seq_id) for seq_id in (1, 2)]
        assert (one.num_tokens(1), one.stats()) == (14, two.stats())
        one.check()

    def test_needs_two_sequences(self) -> None:
        manager = make()
        begin(manager, 1, 4)
        for parent, child in ((1, 2), (2, 1)):
            with pytest.raises(ValueError, match="sequence 2 has no block table"):
                manager.refork(parent, child)
        manager.check()

    def test_other_tokens_can_be_found(self) -> None:
        manager, first, second = make_cache(CacheConfig(8, 4)), [1, 2, 3, 4], [5, 6, 7, 8]
        for seq_id, tokens in enumerate((first, second)):
            manager.create(seq_id, tokens)
            manager.append(seq_id, 4)
        manager.end_step()
        child = second.copy()
        manager.refork(1, 0, child)
        child += [9, 9, 9, 9]
        manager.append(0, 4)
        manager.end_step()
        assert manager.match([*child, 0], 9).num_tokens == 8
        assert manager.match([*first, 0], 5).num_tokens == 4, "computed before, and still cached"
        manager.check()


def test_blocks_as_an_array_are_a_copy() -> None:
    manager = make()
    begin(manager, 1, 6)
    blocks = manager.block_array(1)
    manager.append(1, 4)
    assert (blocks.tolist(), manager.block_array(1).tolist()) == ([0, 1], [0, 1, 2])


class TestCheck:
    def test_finds_an_owner_without_a_table(self) -> None:
        manager = make()
        begin(manager, 1, 4)
        manager._pool.share(0)
        with pytest.raises(AssertionError, match="but held"):
            manager.check()

    def test_finds_a_block_that_nobody_holds(self) -> None:
        manager = make()
        begin(manager, 1, 4)
        del manager._tables[1]
        with pytest.raises(AssertionError, match="but held"):
            manager.check()

    def test_finds_a_write_into_a_shared_block(self) -> None:
        manager = make()
        begin(manager, 1, 5)
        manager.fork(1, 2)
        manager._tables[2].num_tokens = 6
        manager._tables[2]._writable_end = 6
        with pytest.raises(AssertionError, match="holder 2 wrote into 1"):
            manager.check()


class TestSwapping:
    """Four tokens to a block, eight blocks, and eight more in the swap space."""

    def make(
        self, sliding_window: int | None = None, *, caching: bool = False, num_swap_blocks: int = 8
    ) -> KVCacheManager:
        return make_cache(CacheConfig(8, 4, sliding_window, caching, num_swap_blocks))

    def test_out_and_in(self) -> None:
        manager = self.make()
        begin(manager, 1, 6)
        assert manager.swap.swap_out([1]) == [(0, 0), (1, 1)]
        assert (manager.num_free_blocks, manager.swap_space.num_free_blocks) == (8, 6)
        manager.check()
        begin(manager, 2, 1)
        manager.end_step()
        assert manager.swap.num_blocks_to_swap_in([1]) == 2
        copies = manager.swap.swap_in([1])
        assert [copy.src for copy in copies] == [0, 1]
        assert manager.block_ids(1) == [copy.dst for copy in copies]
        assert manager.num_tokens(1) == 6
        assert manager.swap_space.num_free_blocks == 6, "held until the step has read them"
        manager.check()
        manager.end_step()
        assert manager.swap_space.num_free_blocks == 8
        stats = manager.stats()
        swapped = stats.swapped_out_blocks, stats.swapped_in_blocks, stats.swap_used_blocks, stats.swap_total_blocks
        assert swapped == (2, 2, 0, 8)

    def test_without_room_everything_stays(self) -> None:
        manager = self.make(num_swap_blocks=1)
        begin(manager, 1, 6)
        with pytest.raises(OutOfBlocksError, match="need 2 blocks, 1 of 1 are free"):
            manager.swap.swap_out([1])
        assert manager.num_tokens(1) == 6
        manager.check()
        assert make().swap_space.num_free_blocks == 0

    def test_id_of_a_swapped_sequence_is_taken(self) -> None:
        manager = self.make()
        begin(manager, 1, 6)
        manager.swap.swap_out([1])
        with pytest.raises(ValueError, match="sequence 1 already has a block table"):
            manager.create(1)
        manager.free(1)
        assert manager.swap_space.num_free_blocks == 8
        manager.create(1)

    def test_footprint_counts_blocks_once_and_tells_who_else_holds_them(self) -> None:
        manager = self.make()
        begin(manager, 1, 8)
        for child in (2, 3):
            manager.fork(1, child)
            manager.append(child, 1)
        assert manager.swap.footprint([1, 2, 3]) == (4, 0)
        assert manager.swap.footprint([2, 3]) == (4, 2)
        assert manager.swap.footprint([]) == (0, 0)

    def test_group_that_was_planned_in_part_is_as_before(self) -> None:
        manager = self.make()
        begin(manager, 1, 6)
        manager.fork(1, 2)
        manager.end_step()
        manager.append(1, 1)
        assert manager.stats().copied_blocks == 1
        for seq_id in (1, 2):
            manager.retract(seq_id, 6)
        assert manager.stats().copied_blocks == 0
        assert len(manager.swap.swap_out([1, 2])) == 2
        manager.end_step()
        manager.swap.swap_in([1, 2])
        assert manager.block_ids(1) == manager.block_ids(2)
        assert manager.stats().shared_blocks == 2

    def test_what_has_left_the_window_does_not_go_out(self) -> None:
        manager = self.make(sliding_window=4)
        begin(manager, 1, 12)
        assert len(manager.swap.swap_out([1])) == 1, "the next token sees three more"
        manager.end_step()
        assert len(manager.swap.swap_in([1])) == 1
        assert manager.block_ids(1)[:2] == [NULL_BLOCK, NULL_BLOCK]
        manager.check()

    def test_what_the_tree_still_holds_does_not_come_in(self) -> None:
        manager, tokens = self.make(caching=True), list(range(10))
        manager.create(1, tokens)
        manager.append(1, 10)
        manager.end_step()
        held = manager.block_ids(1)
        assert len(manager.swap.swap_out([1])) == 3
        assert manager.stats().cached_blocks == 2, "they can be found by others, too"
        manager.end_step()
        copies = manager.swap.swap_in([1])
        assert len(copies) == 1
        assert manager.block_ids(1)[:2] == held[:2]
        manager.check()
        manager.end_step()
        manager.check()

    def test_what_was_evicted_comes_in(self) -> None:
        manager, tokens = self.make(caching=True), list(range(10))
        manager.create(1, tokens)
        manager.append(1, 10)
        manager.end_step()
        manager.swap.swap_out([1])
        begin(manager, 2, 28)
        manager.end_step()
        manager.free(2)
        assert len(manager.swap.swap_in([1])) == 2, "the first is still there: leaves go before their parents"

    def test_what_comes_in_can_be_found_when_the_step_has_succeeded(self) -> None:
        manager, tokens = self.make(caching=True), list(range(13))
        manager.create(1, tokens)
        manager.append(1, 10)
        manager.end_step()
        manager.swap.swap_out([1])
        begin(manager, 2, 32)                                      # evicts all of it
        manager.end_step()
        manager.free(2)
        manager.swap.swap_in([1])
        manager.append(1, 3)
        assert manager.match(tokens, 12).num_tokens == 0
        assert not manager.match(tokens, 12).is_pending
        manager.end_step()
        manager.publish()
        assert manager.match(tokens, 13).num_tokens == 12

    @pytest.mark.parametrize("num_computed", [0, 10])
    def test_what_a_failed_step_was_to_swap_in_is_not_found(self, num_computed: int) -> None:
        manager, tokens = self.make(caching=True), list(range(13))
        manager.create(1, tokens)
        manager.append(1, 10)
        manager.end_step()
        manager.swap.swap_out([1])
        begin(manager, 2, 32)
        manager.end_step()
        manager.free(2)
        manager.swap.swap_in([1])
        manager.append(1, 3)
        manager.free(1, num_computed)
        manager.end_step()
        assert manager.match(tokens, 12).num_tokens == 0
        manager.check()
        assert (manager.num_free_blocks, manager.swap_space.num_free_blocks) == (8, 8)

    def test_fork_of_what_comes_in_can_be_found_as_well(self) -> None:
        manager, tokens = self.make(caching=True), list(range(8))
        manager.create(1, tokens)
        manager.append(1, 8)
        manager.end_step()
        manager.swap.swap_out([1])
        begin(manager, 2, 32)
        manager.end_step()
        manager.free(2)
        manager.swap.swap_in([1])
        manager.fork(1, 3, tokens.copy())
        manager.end_step()
        manager.free(1)
        manager.free(3, 8)
        assert manager.match([*tokens, 9], 9).num_tokens == 8
