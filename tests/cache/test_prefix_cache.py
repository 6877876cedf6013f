"""Prefixes in the cache, through its manager: match, adopt, pend, evict. Block size 4 unless said otherwise."""

import pytest

from quire.cache.block_table import TableUpdate
from quire.cache.manager import KVCacheManager
from quire.cache.prefix_tree import Path, PrefixMatch
from quire.core.config import CacheConfig
from quire.core.plan import BlockCopy
from quire.scheduling.scheduler import make_cache
from support.counted_calls import CountedCalls

PROMPT = list(range(100, 116))  # four blocks


def make(num_blocks: int = 16, block_size: int = 4, window: int | None = None, caching: bool = True) -> KVCacheManager:
    return make_cache(CacheConfig(num_blocks, block_size, window, caching))


def compute(manager: KVCacheManager, seq_id: int, token_ids: list[int], scope: object = None) -> None:
    """One step that computes a sequence from start to end, finding nothing."""
    manager.create(seq_id, token_ids, scope)
    manager.append(seq_id, len(token_ids))
    manager.end_step()
    manager.check()


def match(manager: KVCacheManager, token_ids: list[int], scope: object = None) -> PrefixMatch:
    return manager.match(token_ids, len(token_ids), scope)


def begin(manager: KVCacheManager, seq_id: int, token_ids: list[int], scope: object = None) -> int:
    """Begin with what is found and compute the rest in one step; return how many tokens that was."""
    manager.create(seq_id, token_ids, scope, match(manager, token_ids, scope))
    num_new = len(token_ids) - manager.num_tokens(seq_id)
    manager.append(seq_id, num_new)
    manager.end_step()
    manager.check()
    return num_new


def path_of(manager: KVCacheManager, seq_id: int) -> Path:
    path = manager._tables[seq_id].path
    assert path is not None
    return path


def finds_nothing(manager: KVCacheManager, token_ids: list[int], scope: object = None) -> bool:
    found = match(manager, token_ids, scope)
    return (len(found.blocks), found.num_tokens, found.is_pending) == (0, 0, False)


class TestMatch:
    def test_nothing_is_found_in_an_empty_cache(self) -> None:
        assert finds_nothing(make(), PROMPT)

    def test_full_blocks_of_a_running_sequence_are_found(self) -> None:
        manager = make()
        compute(manager, 0, PROMPT[:11])
        found = match(manager, PROMPT)
        assert (found.blocks, found.num_tokens, found.num_in_use) == ([0, 1], 8, 2)

    def test_full_blocks_of_an_ended_sequence_are_found(self) -> None:
        manager = make()
        compute(manager, 0, PROMPT[:11])
        manager.free(0, num_computed=11)
        found = match(manager, PROMPT)
        assert (found.blocks, found.num_tokens, found.num_in_use) == ([0, 1], 8, 0)
        stats = manager.stats()
        assert (stats.used_blocks, stats.cached_blocks, stats.free_blocks) == (0, 2, 14)
        assert manager.num_free_blocks == 16

    def test_generated_tokens_are_found_by_the_next_turn(self) -> None:
        """A chat: the prompt and its answer, token by token, and then the next message behind both."""
        manager, tokens = make(), PROMPT[:6]
        compute(manager, 0, tokens)
        for token in (1, 2, 3, 4, 5, 6, 7):
            tokens.append(token)
            manager.append(0, 1)
            manager.end_step()
            manager.check()
        manager.free(0, num_computed=13)
        assert begin(manager, 1, [*tokens, 50, 51]) == 15 - 12

    def test_prompt_found_whole_computes_its_last_token_and_writes_nothing(self) -> None:
        manager = make()
        compute(manager, 0, PROMPT)
        found = match(manager, PROMPT)
        assert (found.blocks, found.num_tokens) == ([0, 1, 2, 3], 15)
        assert manager.create(1, PROMPT.copy(), None, found) is None
        assert manager.append(1, 1) == TableUpdate(4, [], is_stored=True)
        manager.end_step()
        manager.check()
        assert manager.num_free_blocks == 12, "one prompt, stored once"
        assert manager.append(1, 1) == TableUpdate(4, [4])

    def test_match_goes_on_inside_of_a_block_by_copying_it(self) -> None:
        manager = make()
        compute(manager, 0, PROMPT[:12])
        tokens = [*PROMPT[:10], 7, 7, 7]
        found = match(manager, tokens)
        assert (found.blocks, found.num_tokens, found.source, found.num_inside) == ([0, 1], 10, 2, 2)
        assert manager.create(1, tokens, None, found) == BlockCopy(2, 3)
        assert (manager.num_tokens(1), manager.block_ids(1)) == (10, [0, 1, 3])
        assert manager.append(1, 3) == TableUpdate(3, [4])
        manager.check()
        assert manager.stats().copied_blocks == 1

    def test_last_token_is_left_to_compute_inside_of_a_block_too(self) -> None:
        manager = make()
        compute(manager, 0, PROMPT)
        found = match(manager, PROMPT[:10])
        assert (found.num_tokens, found.source, found.num_inside) == (9, 2, 1)
        found = match(manager, PROMPT[:9])
        assert (found.num_tokens, found.num_inside) == (8, 0)

    def test_match_of_whole_blocks_copies_nothing(self) -> None:
        manager = make()
        compute(manager, 0, PROMPT)
        found = match(manager, PROMPT[:11]).of_whole_blocks()
        assert (found.blocks, found.num_tokens) == ([0, 1], 8)
        assert manager.create(1, PROMPT[:11], None, found) is None
        assert match(manager, PROMPT).of_whole_blocks() == match(manager, PROMPT)

    def test_source_is_held_until_the_step_is_over(self) -> None:
        """The block that is about to be copied: copies run before the forward pass."""
        manager = make(num_blocks=5)
        compute(manager, 0, PROMPT[:12])
        manager.free(0, num_computed=12)
        tokens = [*PROMPT[:10], 7]
        assert manager.create(1, tokens, None, match(manager, tokens)) == BlockCopy(2, 3)
        assert manager.num_free_blocks == 1
        manager.check()
        manager.end_step()
        assert manager.num_free_blocks == 2
        manager.check()

    def test_copy_that_finds_no_block_is_left_out(self) -> None:
        manager = make(num_blocks=3)
        compute(manager, 0, PROMPT[:12])
        manager.free(0, num_computed=12)
        tokens = [*PROMPT[:10], 7]
        assert manager.create(1, tokens, None, match(manager, tokens)) is None
        assert (manager.num_tokens(1), manager.block_ids(1), manager.num_free_blocks) == (8, [0, 1], 0)
        manager.check()
        manager.end_step()
        assert manager.append(1, 3) == TableUpdate(2, [2]), "the source has gone, and its block serves"

    def test_scopes_find_nothing_of_each_other(self) -> None:
        manager = make()
        compute(manager, 0, PROMPT, scope="salt")
        for scope in (None, "pepper"):
            assert finds_nothing(manager, PROMPT, scope)
            assert finds_nothing(manager, PROMPT[:3], scope)
        assert match(manager, PROMPT, "salt").num_tokens == 15

    def test_cache_that_is_switched_off_finds_nothing(self) -> None:
        manager = make(caching=False)
        compute(manager, 0, PROMPT)
        manager.free(0, num_computed=16)
        assert finds_nothing(manager, PROMPT)
        assert (manager.stats().cached_blocks, manager.stats().free_blocks) == (0, 16)

    def test_sequence_without_tokens_cannot_be_found(self) -> None:
        manager = make()
        manager.create(0)
        manager.append(0, 16)
        manager.end_step()
        manager.free(0, num_computed=16)
        assert finds_nothing(manager, PROMPT)
        assert manager.stats().cached_blocks == 0

    def test_queries_and_hits_are_counted_in_tokens(self) -> None:
        manager = make()
        manager.prefixes.count_query(16, 0)
        manager.prefixes.count_query(16, 15)
        stats = manager.stats()
        assert (stats.prefix_queries_tokens, stats.prefix_hits_tokens) == (32, 15)


class TestPending:
    def test_block_under_way_is_pending_until_the_step_is_over(self) -> None:
        manager = make()
        manager.create(0, PROMPT)
        manager.append(0, 11)
        found = match(manager, PROMPT)
        assert (found.is_pending, found.num_tokens) == (True, 0)
        manager.check()
        manager.end_step()
        found = match(manager, PROMPT)
        assert (found.is_pending, found.num_tokens) == (False, 8)

    def test_match_tells_what_comes_before_a_pending_block(self) -> None:
        manager = make()
        compute(manager, 0, PROMPT[:8])
        tokens = PROMPT.copy()
        manager.create(1, tokens, None, match(manager, tokens))
        manager.append(1, 8)
        found = match(manager, [*PROMPT, 1])
        assert (found.is_pending, found.blocks, found.num_tokens) == (True, [0, 1], 8)

    def test_block_that_was_computed_before_is_not_pending_when_others_behind_it_are(self) -> None:
        """Decoding has filled it, and not published it; its owners end before the step is over."""
        manager = make()
        manager.create(0, PROMPT[:8])
        for _ in range(8):
            manager.append(0, 1)
            manager.end_step()
        manager.fork(0, 1, [*PROMPT[:8], *range(100, 108)])
        manager.append(1, 8)
        found = match(manager, PROMPT[:9])
        assert (found.is_pending, found.num_tokens) == (False, 8)
        manager.free(1, 8)
        manager.free(0, 8)
        manager.check()
        assert match(manager, PROMPT[:9]).num_tokens == 8

    @pytest.mark.parametrize("num_cached", [0, 8])
    def test_block_under_way_is_pending_in_a_table_that_a_fork_shares(self, num_cached: int) -> None:
        """What a sequence is compared with first may be a branch that was forked in the step under way."""
        manager = make()
        compute(manager, 0, PROMPT[:num_cached])
        manager.create(1, PROMPT, None, match(manager, PROMPT))
        manager.append(1, len(PROMPT) - num_cached)
        manager.fork(1, 2, PROMPT.copy())
        found = manager.match([*PROMPT, 1], len(PROMPT) + 1, None, like=2)
        assert (found.is_pending, found.num_tokens) == (True, num_cached)
        assert found == match(manager, [*PROMPT, 1])._replace(num_known=num_cached // 4)

    def test_wait_goes_on_while_the_same_sequence_computes_what_both_have(self) -> None:
        manager, tokens = make(), [*PROMPT[:10], 7, 8, 9]
        manager.create(0, PROMPT)
        manager.append(0, 4)
        awaited = match(manager, tokens).awaited
        assert awaited is not None
        assert manager.prefixes.still_awaits(awaited, tokens) == awaited
        manager.end_step()
        assert manager.prefixes.still_awaits(awaited, tokens) is None, "no step is under way"
        manager.append(0, 4)
        awaited = manager.prefixes.still_awaits(awaited, tokens)
        assert awaited is not None
        assert (awaited.num_tokens, match(manager, tokens).awaited) == (8, awaited)
        manager.end_step()
        manager.append(0, 4)
        assert manager.prefixes.still_awaits(awaited, tokens) is None, "the third block differs"
        assert match(manager, tokens).num_tokens == 8

    def test_wait_is_over_behind_the_last_full_block(self) -> None:
        manager, tokens = make(), PROMPT[:11]
        manager.create(0, PROMPT)
        manager.append(0, 8)
        awaited = match(manager, tokens).awaited
        assert awaited is not None
        manager.end_step()
        manager.append(0, 4)
        assert manager.prefixes.still_awaits(awaited, tokens) is None
        assert not match(manager, tokens).is_pending

    def test_wait_is_over_when_the_sequence_has_ended(self) -> None:
        manager = make()
        manager.create(0, PROMPT)
        manager.append(0, 8)
        awaited = match(manager, PROMPT).awaited
        assert awaited is not None
        manager.free(0)
        assert manager.prefixes.still_awaits(awaited, PROMPT) is None
        assert finds_nothing(manager, PROMPT)

    def test_wait_is_over_when_the_sequence_and_its_fork_have_ended(self) -> None:
        """Also when a sequence with other tokens computes the same block after them."""
        manager = make(num_blocks=2)
        manager.create(0, PROMPT[:8])
        manager.append(0, 8)
        awaited = match(manager, PROMPT).awaited
        assert awaited is not None
        manager.fork(0, 1, PROMPT[:8])
        manager.free(0)
        manager.free(1)
        manager.create(2, PROMPT[8:])
        manager.append(2, 8)
        assert finds_nothing(manager, PROMPT)
        assert manager.prefixes.still_awaits(awaited, PROMPT) is None

    def test_wait_goes_on_without_work_for_what_was_computed_before(self) -> None:
        tokens = list(range(4096))
        manager = make(num_blocks=1030)
        manager.create(0, tokens)
        awaited, num_calls = None, set()
        for _ in range(4):
            manager.append(0, 1024)
            if awaited is None:
                awaited = match(manager, tokens).awaited
            else:
                with CountedCalls() as calls:
                    awaited = manager.prefixes.still_awaits(awaited, tokens)
                num_calls.add(calls.count)
            assert awaited is not None
            manager.end_step()
        assert len(num_calls) == 1

    def test_other_prompts_wait_for_nothing(self) -> None:
        manager = make()
        manager.create(0, PROMPT)
        manager.append(0, 16)
        assert finds_nothing(manager, [1, 2, 3, 4, 5])
        assert finds_nothing(manager, PROMPT, "salt")

    def test_nothing_is_copied_from_a_pending_block(self) -> None:
        manager = make()
        manager.create(0, PROMPT)
        manager.append(0, 16)
        assert finds_nothing(manager, PROMPT[:3])

    @pytest.mark.parametrize("num_forks", [0, 2])
    def test_pending_blocks_vanish_with_their_owners(self, num_forks: int) -> None:
        manager = make()
        manager.create(0, PROMPT)
        manager.append(0, 14)
        for child in range(1, 1 + num_forks):
            manager.fork(0, child, PROMPT.copy())
        for seq_id in range(num_forks):
            manager.free(seq_id)
            assert match(manager, PROMPT).is_pending, "the last branch still computes them"
            manager.check()
        manager.free(num_forks)
        manager.check()
        manager.end_step()
        assert finds_nothing(manager, PROMPT)
        assert manager.stats().free_blocks == 16

    @pytest.mark.parametrize(("num_computed", "num_found"), [(0, 0), (5, 1), (8, 2), (11, 2)])
    def test_block_that_was_not_computed_whole_is_not_found(self, num_computed: int, num_found: int) -> None:
        manager = make()
        manager.create(0, PROMPT)
        manager.append(0, 12)
        assert match(manager, PROMPT).is_pending
        manager.truncate(0, num_computed)
        manager.end_step()
        manager.check()
        manager.publish()
        manager.check()
        found = match(manager, PROMPT)
        assert (len(found.blocks), found.is_pending) == (num_found, False)
        manager.free(0, num_computed)
        assert manager.num_free_blocks == 16

    def test_failed_step_leaves_what_came_before_it(self) -> None:
        manager = make()
        manager.create(0, PROMPT)
        manager.append(0, 6)
        manager.end_step()
        manager.append(0, 10)
        manager.free(0, num_computed=6)
        manager.end_step()
        manager.check()
        assert match(manager, PROMPT).num_tokens == 4


class TestAdoption:
    def test_block_that_is_there_already_is_adopted(self) -> None:
        """Two sequences of which neither looked compute the same prompt; the second gives its blocks up."""
        manager = make()
        compute(manager, 0, PROMPT[:8])
        compute(manager, 1, PROMPT[:8])
        assert manager.stats().used_blocks == 4
        manager.publish()
        assert (manager.block_ids(1), manager.stats().used_blocks) == ([0, 1], 2)
        assert manager.append(1, 1) == TableUpdate(0, [0, 1, 3]), "the worker is told from the first new column on"
        manager.check()

    def test_decodes_that_say_the_same_share_what_they_said(self) -> None:
        manager = make()
        both = [PROMPT[:5], PROMPT[:5]]
        for seq_id, tokens in enumerate(both):
            begin(manager, seq_id, tokens)
        for token in range(11):
            manager.publish()
            for seq_id, tokens in enumerate(both):
                tokens.append(token)
                manager.append(seq_id, 1)
            manager.end_step()
            manager.check()
        first, second = manager.block_ids(0), manager.block_ids(1)
        assert (first[:3], len(first)) == (second[:3], 4)
        manager.publish()
        assert (manager.block_ids(1), manager.stats().used_blocks) == (first, 4)

    def test_adoption_waits_for_whoever_computes_the_block_now(self) -> None:
        manager = make()
        for seq_id in (0, 1):
            manager.create(seq_id, PROMPT)
            manager.append(seq_id, 12)
        manager.check()
        assert manager.block_ids(1) == [3, 4, 5]
        manager.end_step()
        manager.publish()
        assert manager.append(1, 1) == TableUpdate(0, [0, 1, 2, 5])
        manager.check()

    def test_ended_sequence_adopts_nothing_that_is_still_being_computed(self) -> None:
        manager = make()
        compute(manager, 0, PROMPT[:8])
        manager.create(1, PROMPT, "salt")
        manager.append(1, 8)
        manager.create(2, PROMPT, "salt")
        manager.free(2, num_computed=0)
        manager.free(0, num_computed=8)
        manager.check()
        assert match(manager, PROMPT, "salt").is_pending

    def test_worker_hears_of_an_adoption_even_if_the_append_had_to_be_tried_again(self) -> None:
        manager = make(num_blocks=7)
        compute(manager, 0, PROMPT[:8])
        compute(manager, 1, PROMPT[:8])
        path_of(manager, 1).token_ids = PROMPT
        manager.create(2)
        manager.append(2, 12)
        manager.publish()
        assert manager.block_ids(1) == [0, 1]
        with pytest.raises(Exception, match="need 3 blocks, 2 of 7"):
            manager.append(1, 9)
        manager.free(2)
        update = manager.append(1, 8)
        assert update is not None
        assert (update.first_column, update.blocks[:2], manager.block_ids(1)) == (0, [0, 1], update.blocks)
        manager.check()

    def test_worker_hears_of_an_adoption_even_if_the_next_append_is_a_shorter_one(self) -> None:
        manager = make(num_blocks=5)
        compute(manager, 0, PROMPT[:8])
        manager.create(1, PROMPT)
        manager.append(1, 5)
        manager.end_step()
        compute(manager, 2, [1])
        manager.publish()
        with pytest.raises(Exception, match="need 2 blocks, 1 of 5"):
            manager.append(1, 11)
        assert manager.append(1, 1) == TableUpdate(0, [0, 3])
        manager.check()

    def test_branches_adopt_one_by_one(self) -> None:
        manager = make()
        compute(manager, 0, PROMPT[:9])
        compute(manager, 1, PROMPT[:9])
        branches = [[*PROMPT[:9], 1], [*PROMPT[:9], 2]]
        path_of(manager, 1).token_ids = branches[0]
        manager.fork(1, 2, branches[1])
        manager.publish()
        for seq_id in (1, 2):
            manager.append(seq_id, 1)
            manager.check()
        manager.end_step()
        assert manager.block_ids(1)[:2] == manager.block_ids(2)[:2] == [0, 1]

    def test_ended_sequence_leaves_nothing_twice(self) -> None:
        manager = make()
        for seq_id in (0, 1):
            compute(manager, seq_id, PROMPT)
        for seq_id in (0, 1):
            manager.free(seq_id, num_computed=16)
        assert (manager.stats().cached_blocks, manager.stats().free_blocks) == (4, 12)
        manager.check()


class TestEviction:
    def test_cached_blocks_are_given_up_when_nothing_else_is_free(self) -> None:
        manager = make(num_blocks=5)
        compute(manager, 0, PROMPT)
        manager.free(0, num_computed=16)
        compute(manager, 1, [1] * 10)
        assert (match(manager, PROMPT).num_tokens, manager.stats().evicted_blocks) == (8, 2)
        assert manager.stats().cached_blocks == 2

    def test_what_was_used_last_stays_longest(self) -> None:
        manager = make(num_blocks=4)
        for seq_id, token in enumerate((1, 2, 3)):
            compute(manager, seq_id, [token] * 4)
            manager.free(seq_id, num_computed=4)
        begin(manager, 3, [1] * 5)
        manager.free(3, num_computed=5)
        compute(manager, 4, [9] * 8)
        assert [match(manager, [token] * 5).num_tokens for token in (1, 2, 3)] == [4, 0, 4]

    def test_shared_beginning_outlives_what_followed_it(self) -> None:
        manager = make(num_blocks=4)
        compute(manager, 0, PROMPT[:8])
        manager.free(0, num_computed=8)
        begin(manager, 1, [*PROMPT[:4], 9, 9, 9, 9])
        manager.free(1, num_computed=8)
        compute(manager, 2, [5] * 9)
        assert match(manager, [*PROMPT[:4], 8]).num_tokens == 4
        assert match(manager, PROMPT[:8]).of_whole_blocks().num_tokens == 4

    def test_nothing_that_is_in_use_is_given_up(self) -> None:
        manager = make(num_blocks=4)
        compute(manager, 0, PROMPT[:12])
        manager.create(1, [1] * 9)
        with pytest.raises(Exception, match="need 3 blocks, 1 of 4"):
            manager.append(1, 9)
        manager.check()
        assert match(manager, PROMPT).num_tokens == 12


class TestSlidingWindow:
    def test_blocks_that_left_the_window_can_be_found(self) -> None:
        manager = make(window=5)
        tokens = PROMPT.copy()
        manager.create(0, tokens)
        for count in (8, 4, 4):
            manager.append(0, count)
            manager.end_step()
            manager.check()
        assert manager.block_ids(0)[:2] == [-1, -1]
        assert match(manager, [*PROMPT, 1]).num_tokens == 16
        manager.free(0, num_computed=16)
        assert begin(manager, 1, [*PROMPT, 1]) == 1

    def test_sequence_goes_on_when_its_beginning_is_given_up(self) -> None:
        """The parents of blocks in use are evicted: what follows cannot be found, and nothing else happens."""
        manager = make(num_blocks=5, window=5)
        tokens = PROMPT.copy()
        manager.create(0, tokens)
        for count in (8, 4, 4):
            manager.append(0, count)
            manager.end_step()
        compute(manager, 1, [1] * 12)
        assert match(manager, [*PROMPT, 1]).blocks == []
        manager.free(1)
        for token in range(9):
            tokens.append(token)
            manager.append(0, 1)
            manager.end_step()
            manager.check()
        manager.free(0, num_computed=25)
        manager.check()
        assert manager.num_free_blocks == 5


def test_check_finds_a_path_that_is_not_in_the_tree() -> None:
    manager = make()
    compute(manager, 0, PROMPT.copy())
    path_of(manager, 0).token_ids[2] = 7
    with pytest.raises(AssertionError, match="column 0 is not block 0"):
        manager.check()


def test_check_finds_a_pending_block_without_an_owner() -> None:
    manager = make()
    compute(manager, 0, PROMPT)
    manager.free(0, num_computed=16)
    manager.prefixes._tree.pending.add(3)
    with pytest.raises(AssertionError, match=r"no sequence computes the pending blocks \[3\]"):
        manager.check()


class TestPathWithoutItsBeginning:
    """A path whose first blocks have left the window and been given up: all behind them has left the tree as well."""

    @pytest.fixture
    def manager(self) -> KVCacheManager:
        """Blocks of one token, a window of 2: sequence 0 computes its last two tokens while another takes its first."""
        manager = make(num_blocks=7, block_size=1, window=2)
        manager.create(0, PROMPT[:6])
        manager.append(0, 4)
        manager.end_step()
        manager.append(0, 2)
        manager.create(1, [1, 2])
        manager.append(1, 2)
        return manager

    def test_what_left_the_tree_is_neither_found_nor_awaited(self, manager: KVCacheManager) -> None:
        for _ in range(2):
            found = match(manager, PROMPT[:6])
            assert (len(found.blocks), found.is_pending) == (2, False), "the third was given up"
            manager.end_step()
            manager.publish()
            manager.check()

    def test_retract_takes_the_path_back_with_the_table(self, manager: KVCacheManager) -> None:
        manager.retract(0, 4)
        assert path_of(manager, 0).num_blocks <= len(manager.block_ids(0))
        manager.check()
        manager.end_step()
        manager.free(0, 4)
        manager.free(1)
        manager.check()
        assert manager.num_free_blocks == 7


def test_retracted_blocks_are_not_found_where_a_fork_shares_them_again() -> None:
    """A fork copies the last block, its parent fills the block itself; both appends are taken back, the copy first."""
    manager = make()
    compute(manager, 0, PROMPT[:6])
    manager.fork(0, 1, PROMPT[:6])
    manager.append(1, 1)
    manager._tables[0].path.token_ids.extend(PROMPT[6:10])
    manager.append(0, 4)
    manager.retract(1, 6)
    manager.retract(0, 6)
    manager.end_step()
    manager.check()
    found = match(manager, PROMPT[:10])
    assert (len(found.blocks), found.num_inside) == (1, 0), "tokens 6 and 7 were never computed"
