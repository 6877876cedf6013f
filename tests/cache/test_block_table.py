"""BlockTable: growth, sharing, copy-on-write, lookup and dropped blocks. Block size 4 unless said otherwise."""

import numpy as np
import pytest

from quire.cache.block_pool import BlockPool, OutOfBlocksError
from quire.cache.block_table import NULL_BLOCK, BlockTable, TableUpdate
from quire.cache.swap_space import places_of
from quire.core.plan import BlockCopy
from support.counted_calls import CountedCalls


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(8)


def table_of(pool: BlockPool, num_tokens: int, block_size: int = 4) -> BlockTable:
    table = BlockTable(pool, block_size)
    table.append(num_tokens)
    return table


def ref_counts(pool: BlockPool) -> list[int]:
    return [pool.ref_count(block) for block in range(pool.num_blocks)]


def check(pool: BlockPool, *tables: BlockTable) -> None:
    pool.check()
    for table in tables:
        table.check()


class TestAppend:
    @pytest.mark.parametrize("block_size", [0, -4])
    def test_block_without_slots_is_refused(self, pool: BlockPool, block_size: int) -> None:
        with pytest.raises(ValueError, match=f"block_size must be at least 1, got {block_size}"):
            BlockTable(pool, block_size)

    def test_new_table_holds_nothing(self, pool: BlockPool) -> None:
        table = BlockTable(pool, 4)
        assert (table.blocks, table.num_tokens, pool.num_free_blocks) == ([], 0, 8)
        table.check()

    def test_first_tokens_open_the_first_columns(self, pool: BlockPool) -> None:
        table = BlockTable(pool, 4)
        assert table.append(5) == TableUpdate(first_column=0, blocks=[0, 1], copy=None)
        assert (table.blocks, table.num_tokens) == ([0, 1], 5)

    def test_tokens_that_fit_the_last_block_change_no_column(self, pool: BlockPool) -> None:
        table = table_of(pool, 5)
        assert table.append(1) is None
        assert table.append(2) is None
        assert (table.blocks, table.num_tokens) == ([0, 1], 8)

    def test_full_last_block_makes_the_next_token_open_a_column(self, pool: BlockPool) -> None:
        table = table_of(pool, 8)
        assert table.append(1) == TableUpdate(2, [2], None)
        assert table.num_tokens == 9

    def test_update_names_only_the_new_columns(self, pool: BlockPool) -> None:
        table = table_of(pool, 6)
        assert table.append(7) == TableUpdate(2, [2, 3], None)
        assert table.blocks == [0, 1, 2, 3]

    def test_update_is_not_the_table_itself(self, pool: BlockPool) -> None:
        table = BlockTable(pool, 4)
        update = table.append(4)
        assert update is not None
        update.blocks.append(99)
        assert table.blocks == [0]

    def test_blocks_of_one_token(self, pool: BlockPool) -> None:
        table = table_of(pool, 2, block_size=1)
        assert table.append(1) == TableUpdate(2, [2], None)
        child = table.fork()
        assert child.append(1) == TableUpdate(3, [3], None)
        check(pool, table, child)

    def test_appending_nothing_changes_nothing_even_when_shared(self, pool: BlockPool) -> None:
        table = table_of(pool, 6)
        child = table.fork()
        assert table.append(0) is None
        assert (table.blocks, table.num_tokens, ref_counts(pool)[:3]) == ([0, 1], 6, [2, 2, 0])
        assert BlockTable(pool, 4).append(0) is None
        check(pool, table, child)

    @pytest.mark.parametrize("num_tokens", [0, 3, 4])
    def test_negative_count_is_a_fault(self, pool: BlockPool, num_tokens: int) -> None:
        table = table_of(pool, num_tokens)
        with pytest.raises(AssertionError, match="cannot append -1 tokens"):
            table.append(-1)
        assert table.num_tokens == num_tokens

    def test_out_of_blocks_changes_nothing(self, pool: BlockPool) -> None:
        table = table_of(pool, 6)
        with pytest.raises(OutOfBlocksError, match="need 7 blocks, 6 of 8 are free"):
            table.append(27)
        assert (table.blocks, table.num_tokens, ref_counts(pool)) == ([0, 1], 6, [1, 1, 0, 0, 0, 0, 0, 0])
        assert table.append(26) == TableUpdate(2, [2, 3, 4, 5, 6, 7], None)
        check(pool, table)


class TestForkAndCopyOnWrite:
    def test_fork_shares_every_block_and_takes_none(self, pool: BlockPool) -> None:
        parent = table_of(pool, 6)
        child = parent.fork()
        assert (child.blocks, child.num_tokens) == ([0, 1], 6)
        assert ref_counts(pool)[:3] == [2, 2, 0]
        check(pool, parent, child)

    def test_fork_of_an_empty_table_is_empty(self, pool: BlockPool) -> None:
        child = BlockTable(pool, 4).fork()
        assert (child.blocks, child.num_tokens) == ([], 0)
        assert child.append(1) == TableUpdate(0, [0], None)

    @pytest.mark.parametrize("writer_is_child", [False, True])
    def test_first_write_to_a_shared_block_copies_it_and_the_second_does_not(
        self, pool: BlockPool, writer_is_child: bool
    ) -> None:
        parent = table_of(pool, 6)
        child = parent.fork()
        first, second = (child, parent) if writer_is_child else (parent, child)
        assert first.append(1) == TableUpdate(1, [2], BlockCopy(src=1, dst=2))
        assert (first.blocks, second.blocks) == ([0, 2], [0, 1])
        assert ref_counts(pool)[:3] == [2, 1, 1]
        assert second.append(1) is None
        assert second.blocks == [0, 1]
        check(pool, parent, child)

    def test_copied_block_is_written_in_place_from_then_on(self, pool: BlockPool) -> None:
        parent = table_of(pool, 5)
        child = parent.fork()
        child.append(1)
        assert child.append(1) is None
        assert child.append(1) is None
        assert child.append(1) == TableUpdate(2, [3], None)
        check(pool, parent, child)

    def test_write_past_a_shared_block_copies_it_and_opens_columns(self, pool: BlockPool) -> None:
        parent = table_of(pool, 6)
        child = parent.fork()
        assert child.append(7) == TableUpdate(1, [2, 3, 4], BlockCopy(1, 2))
        assert (child.blocks, child.num_tokens) == ([0, 2, 3, 4], 13)
        check(pool, parent, child)

    def test_fork_at_a_border_never_copies(self, pool: BlockPool) -> None:
        parent = table_of(pool, 8)
        child = parent.fork()
        assert child.append(1) == TableUpdate(2, [2], None)
        assert parent.append(1) == TableUpdate(2, [3], None)
        assert ref_counts(pool)[:4] == [2, 2, 1, 1]
        check(pool, parent, child)

    def test_block_may_be_written_in_place_again_when_the_other_owner_has_left(self, pool: BlockPool) -> None:
        parent = table_of(pool, 6)
        parent.fork().free()
        assert parent.append(1) is None
        assert parent.append(1) is None
        assert parent.blocks == [0, 1]
        check(pool, parent)

    def test_second_fork_makes_a_written_block_shared_again(self, pool: BlockPool) -> None:
        parent = table_of(pool, 5)
        first = parent.fork()
        first.append(1)
        second = first.fork()
        assert first.append(1) == TableUpdate(1, [3], BlockCopy(2, 3))
        assert second.append(1) is None
        check(pool, parent, first, second)

    def test_fork_of_a_fork_counts_every_owner(self, pool: BlockPool) -> None:
        root = table_of(pool, 3)
        child = root.fork()
        grandchild = child.fork()
        assert ref_counts(pool)[0] == 3
        assert [t.append(1) is not None for t in (grandchild, root, child)] == [True, True, False]
        check(pool, root, child, grandchild)

    def test_copy_that_finds_no_block_changes_nothing(self) -> None:
        pool = BlockPool(2)
        parent = table_of(pool, 6)
        child = parent.fork()
        with pytest.raises(OutOfBlocksError, match="need 1 blocks, 0 of 2"):
            child.append(1)
        assert (child.blocks, child.num_tokens, ref_counts(pool)) == ([0, 1], 6, [2, 2])
        check(pool, parent, child)
        parent.free()
        assert child.append(1) is None

    def test_copy_and_growth_are_one_allocation(self) -> None:
        pool = BlockPool(3)
        parent = table_of(pool, 6)
        child = parent.fork()
        with pytest.raises(OutOfBlocksError, match="need 2 blocks, 1 of 3"):
            child.append(3)
        assert (child.blocks, child.num_tokens, ref_counts(pool)) == ([0, 1], 6, [2, 2, 0])
        assert child.append(2) == TableUpdate(1, [2], BlockCopy(1, 2))
        check(pool, parent, child)

    @pytest.mark.parametrize("count", range(12))
    @pytest.mark.parametrize("num_tokens", [0, 3, 4, 6])
    @pytest.mark.parametrize("is_shared", [False, True])
    def test_cost_of_an_append_is_known_beforehand(self, num_tokens: int, count: int, is_shared: bool) -> None:
        pool = BlockPool(8)
        table = table_of(pool, num_tokens)
        other = table.fork() if is_shared else BlockTable(pool, 4)
        cost = table.num_blocks_to_append(count)
        num_free = pool.num_free_blocks
        table.append(count)
        assert num_free - pool.num_free_blocks == cost
        check(pool, table, other)


class TestFree:
    def test_free_gives_back_everything_and_leaves_an_empty_table(self, pool: BlockPool) -> None:
        table = table_of(pool, 10)
        table.free()
        assert (table.blocks, table.num_tokens, pool.num_free_blocks) == ([], 0, 8)
        assert table.append(1) is not None
        check(pool, table)

    def test_next_table_gets_the_same_blocks_in_the_same_order(self, pool: BlockPool) -> None:
        table_of(pool, 12).free()
        assert table_of(pool, 12).blocks == [0, 1, 2]

    def test_free_of_a_fork_leaves_the_others_whole(self, pool: BlockPool) -> None:
        parent = table_of(pool, 6)
        child = parent.fork()
        child.append(4)
        parent.free()
        assert ref_counts(pool)[:4] == [1, 0, 1, 1]
        assert child.blocks == [0, 2, 3]
        check(pool, parent, child)


class TestLocate:
    def test_every_position_has_a_slot_of_its_own(self, pool: BlockPool) -> None:
        table = table_of(pool, 11)
        slots = [table.locate(position) for position in range(11)]
        assert slots == [(block, offset) for block in (0, 1, 2) for offset in range(4)][:11]

    @pytest.mark.parametrize("position", [-1, 6, 7, 100])
    def test_position_without_a_token_is_an_error(self, pool: BlockPool, position: int) -> None:
        with pytest.raises(IndexError, match=f"position {position} is outside of a table of 6 tokens"):
            table_of(pool, 6).locate(position)

    def test_dropped_position_is_an_error_of_its_own(self, pool: BlockPool) -> None:
        table = table_of(pool, 10)
        table.drop_before(5)
        with pytest.raises(IndexError, match="position 3 was dropped"):
            table.locate(3)
        assert table.locate(4) == (1, 0)


class TestDropBefore:
    @pytest.mark.parametrize(("position", "num_dropped"), [(-3, 0), (0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (10, 2)])
    def test_only_blocks_wholly_before_the_position_go(self, pool: BlockPool, position: int, num_dropped: int) -> None:
        table = table_of(pool, 10)
        assert table.drop_before(position) == num_dropped
        assert table.blocks == [NULL_BLOCK] * num_dropped + [0, 1, 2][num_dropped:]
        assert pool.num_free_blocks == 5 + num_dropped
        check(pool, table)

    def test_each_block_is_dropped_once(self, pool: BlockPool) -> None:
        table = table_of(pool, 12)
        assert [table.drop_before(position) for position in (5, 6, 8, 2, 12, 12)] == [1, 0, 1, 0, 1, 0]
        check(pool, table)

    def test_other_owner_keeps_a_dropped_block(self, pool: BlockPool) -> None:
        parent = table_of(pool, 10)
        child = parent.fork()
        child.drop_before(8)
        assert (parent.blocks, child.blocks) == ([0, 1, 2], [NULL_BLOCK, NULL_BLOCK, 2])
        assert ref_counts(pool)[:3] == [1, 1, 2]
        check(pool, parent, child)

    def test_fork_of_a_table_with_dropped_blocks_shares_the_rest(self, pool: BlockPool) -> None:
        parent = table_of(pool, 10)
        parent.drop_before(4)
        child = parent.fork()
        assert child.blocks == [NULL_BLOCK, 1, 2]
        assert child.append(1) == TableUpdate(2, [0], BlockCopy(2, 0))
        assert child.drop_before(8) == 1
        parent.free()
        child.free()
        assert pool.num_free_blocks == 8
        check(pool, parent, child)

    def test_table_grows_on_after_all_its_blocks_were_dropped(self, pool: BlockPool) -> None:
        table = table_of(pool, 8)
        table.drop_before(8)
        assert table.blocks == [NULL_BLOCK, NULL_BLOCK]
        assert table.append(1) == TableUpdate(2, [1], None)  # freed last, so taken first
        check(pool, table)

    def test_tokens_still_to_come_cannot_be_dropped(self, pool: BlockPool) -> None:
        table = table_of(pool, 6)
        with pytest.raises(IndexError, match="cannot drop before position 8: the table has 6 tokens"):
            table.drop_before(8)
        assert table.blocks == [0, 1]
        check(pool, table)


class TestCheck:
    def test_finds_a_missing_column(self, pool: BlockPool) -> None:
        table = table_of(pool, 6)
        table.columns.pop()
        with pytest.raises(AssertionError, match=r"6 tokens in \[0\]"):
            table.check()

    def test_finds_a_block_that_is_not_in_use(self, pool: BlockPool) -> None:
        table = table_of(pool, 6)
        pool.release(0)
        with pytest.raises(AssertionError, match="a free block in"):
            table.check()

    def test_finds_a_hole_that_was_not_dropped(self, pool: BlockPool) -> None:
        table = table_of(pool, 6)
        table.columns[0] = NULL_BLOCK
        with pytest.raises(AssertionError, match="no block -1"):
            table.check()

    def test_finds_a_shared_block_that_would_be_written_in_place(self, pool: BlockPool) -> None:
        table = table_of(pool, 6)
        pool.share(1)
        with pytest.raises(AssertionError, match="shared but writable"):
            table.check()


class TestBegin:
    """A table that begins with blocks of others."""

    def test_blocks_are_shared_and_the_next_token_opens_a_column(self, pool: BlockPool) -> None:
        other = table_of(pool, 8)
        table = BlockTable(pool, 4)
        table.begin(other.blocks, 8)
        assert (table.blocks, table.num_tokens, table.num_filled, ref_counts(pool)[:3]) == ([0, 1], 8, 8, [2, 2, 0])
        assert table.append(1) == TableUpdate(2, [2])
        check(pool, table, other)

    def test_last_token_may_be_left_to_append_and_is_not_written(self, pool: BlockPool) -> None:
        other = table_of(pool, 8)
        table = BlockTable(pool, 4)
        table.begin(other.blocks, 7)
        assert (table.num_tokens, table.num_filled, table.num_blocks_to_append(1)) == (7, 8, 0)
        check(pool, table, other)
        assert table.append(1) == TableUpdate(2, [], is_stored=True)
        assert (table.num_tokens, table.blocks, ref_counts(pool)[:3]) == (8, [0, 1], [2, 2, 0])
        assert table.append(1) == TableUpdate(2, [2])
        check(pool, table, other)

    def test_more_than_the_token_left_out_is_a_fault(self, pool: BlockPool) -> None:
        table = BlockTable(pool, 4)
        table.begin(table_of(pool, 4).blocks, 3)
        with pytest.raises(AssertionError, match="2 tokens appended where one was left out"):
            table.append(2)

    def test_fork_leaves_the_same_token_out(self, pool: BlockPool) -> None:
        table = BlockTable(pool, 4)
        table.begin(table_of(pool, 4).blocks, 3)
        child = table.fork()
        for each in (child, table):
            assert each.append(1) == TableUpdate(1, [], is_stored=True)
        check(pool, table, child)

    def test_blocks_of_one_token(self, pool: BlockPool) -> None:
        table = BlockTable(pool, 1)
        table.begin(table_of(pool, 3, block_size=1).blocks, 2)
        check(pool, table)
        assert table.append(1) == TableUpdate(3, [], is_stored=True)
        assert table.append(1) == TableUpdate(3, [3])
        check(pool, table)

    def test_begun_table_gives_its_shares_back(self, pool: BlockPool) -> None:
        other = table_of(pool, 8)
        table = BlockTable(pool, 4)
        table.begin(other.blocks, 7)
        table.free()
        assert (ref_counts(pool)[:2], table.num_filled) == ([1, 1], 0)
        check(pool, table, other)

    @pytest.mark.parametrize("num_tokens", [6, 9])
    def test_only_the_last_token_may_be_left_out(self, pool: BlockPool, num_tokens: int) -> None:
        with pytest.raises(AssertionError, match=f"{num_tokens} tokens in 2 blocks"):
            BlockTable(pool, 4).begin(table_of(pool, 8).blocks, num_tokens)


def test_column_gets_another_block_of_the_same_content(pool: BlockPool) -> None:
    table, other = table_of(pool, 8), table_of(pool, 8)
    table.replace(0, other.blocks[0])
    assert (table.blocks, ref_counts(pool)[:4]) == ([2, 1], [0, 1, 2, 1])
    check(pool, table, other)


class TestRetract:
    def test_columns_of_the_append_go(self, pool: BlockPool) -> None:
        table = table_of(pool, 7)
        table.append(6)
        assert table.retract(7) is False
        assert (table.blocks, table.num_tokens, pool.num_free_blocks) == ([0, 1], 7, 6)
        check(pool, table)
        assert table.append(1) is None

    def test_nothing_appended_is_nothing_to_retract(self, pool: BlockPool) -> None:
        table = table_of(pool, 7)
        assert table.retract(7) is False
        check(pool, table)

    def test_block_that_was_to_be_copied_is_shared_again(self, pool: BlockPool) -> None:
        table = table_of(pool, 6)
        others = [table.fork(), table.fork()]
        for each in (table, *others):
            each.append(1)
        assert [each.retract(6) for each in (table, *others)] == [True, True, False], "the last wrote in place"
        assert {tuple(each.blocks) for each in (table, *others)} == {(0, 1)}
        assert ref_counts(pool)[:4] == [3, 3, 0, 0]
        check(pool, table, *others)
        update = table.append(1)
        assert update is not None
        assert update.copy == BlockCopy(1, update.blocks[0])

    def test_copy_of_an_earlier_step_stands(self, pool: BlockPool) -> None:
        table = table_of(pool, 6)
        other = table.fork()
        table.append(1)
        table.append(4)
        assert table.retract(7) is False
        assert (table.blocks, other.blocks) == ([0, 2], [0, 1])
        check(pool, table, other)

    def test_copy_retracted_before_is_not_retracted_twice(self, pool: BlockPool) -> None:
        table = table_of(pool, 6)
        other = table.fork()
        table.append(1)
        table.retract(6)
        other.free()
        table.append(1)
        assert table.retract(6) is False
        assert (table.blocks, ref_counts(pool)[:3]) == ([0, 1], [1, 1, 0])

    def test_token_that_was_stored_is_left_out_again(self, pool: BlockPool) -> None:
        lender, table = table_of(pool, 8), BlockTable(pool, 4)
        table.begin(lender.blocks, 7)
        table.append(1)
        table.retract(7)
        check(pool, lender, table)
        update = table.append(1)
        assert update is not None
        assert update.is_stored


class TestTruncate:
    @pytest.mark.parametrize(("num_tokens", "blocks"), [(10, [0, 1, 2]), (9, [0, 1, 2]), (8, [0, 1]), (0, [])])
    def test_blocks_behind_the_last_token_are_released(
        self, pool: BlockPool, num_tokens: int, blocks: list[int]
    ) -> None:
        table = table_of(pool, 11)
        table.truncate(num_tokens)
        assert (table.num_tokens, table.blocks) == (num_tokens, blocks)
        assert pool.num_free_blocks == 8 - len(blocks)
        check(pool, table)
        table.append(11 - num_tokens)
        assert len(table.blocks) == 3
        check(pool, table)

    def test_copy_that_was_made_stays(self, pool: BlockPool) -> None:
        table = table_of(pool, 6)
        other = table.fork()
        update = table.append(3)
        assert update is not None
        assert update.copy is not None
        table.truncate(6)
        assert table.blocks == [0, update.copy.dst]
        assert other.blocks == [0, 1]
        assert table.append(1) is None
        check(pool, table, other)

    def test_block_that_another_holds_is_copied_before_it_is_written(self, pool: BlockPool) -> None:
        table = table_of(pool, 7)
        other = table.fork()
        table.truncate(5)
        update = table.append(1)
        assert update is not None
        assert update.copy == BlockCopy(1, 2)
        assert other.blocks == [0, 1]
        check(pool, table, other)

    def test_no_more_tokens_than_there_are(self, pool: BlockPool) -> None:
        with pytest.raises(AssertionError):
            table_of(pool, 7).truncate(8)


class TestMoved:
    def test_twin_holds_the_same_tokens_at_other_places(self, pool: BlockPool) -> None:
        table, other_pool = table_of(pool, 10), BlockPool(5)
        other_pool.allocate(3)
        twin = table.relocate(other_pool, places_of(table.as_array(), np.array([2, 1, 0]), pool.num_blocks))
        assert (twin.blocks, twin.num_tokens, twin.num_filled) == ([2, 1, 0], 10, 10)
        assert [other_pool.ref_count(block) for block in range(3)] == [2, 2, 2]
        check(other_pool, twin)
        check(pool, table)


class TestBecome:
    """A table that takes over the blocks of another: `free`, then `fork`, at the cost of the difference."""

    @pytest.fixture
    def branches(self, pool: BlockPool) -> tuple[BlockTable, BlockTable]:
        """Two tables that share blocks 0 and 1; block 2 is the first one's, 3 and 4 are the second one's."""
        first = table_of(pool, 8)
        second = first.fork()
        first.append(3)
        second.append(6)
        return first, second

    def test_shares_every_block_of_the_other(self, pool: BlockPool, branches: tuple[BlockTable, BlockTable]) -> None:
        first, second = branches
        first.become(second)
        assert (first.blocks, first.num_tokens, ref_counts(pool)[:5]) == ([0, 1, 3, 4], 14, [2, 2, 0, 2, 2])
        check(pool, first, second)
        for each in branches:
            update = each.append(1)
            assert (update is not None and update.copy is not None) == (each is first), "the last owner writes in place"
        check(pool, first, second)

    def test_table_that_is_longer_gives_up_the_rest(
        self, pool: BlockPool, branches: tuple[BlockTable, BlockTable]
    ) -> None:
        first, second = branches
        second.become(first)
        assert (second.blocks, second.num_tokens, pool.num_free_blocks) == ([0, 1, 2], 11, 5)
        check(pool, first, second)

    def test_columns_that_left_the_window_of_either(
        self, pool: BlockPool, branches: tuple[BlockTable, BlockTable]
    ) -> None:
        first, second = branches
        second.drop_before(8)
        first.become(second)
        assert first.blocks == second.blocks == [NULL_BLOCK, NULL_BLOCK, 3, 4]
        assert ref_counts(pool)[:5] == [0, 0, 0, 2, 2]
        check(pool, first, second)
        other = table_of(pool, 4)
        first.become(other)
        assert (first.blocks, ref_counts(pool)[3:5]) == (other.blocks, [1, 1])
        check(pool, first, second, other)

    def test_last_token_that_is_stored_already(self, pool: BlockPool) -> None:
        lender, table, other = table_of(pool, 8), BlockTable(pool, 4), table_of(pool, 1)
        table.begin(lender.blocks, 7)
        other.become(table)
        assert (other.num_tokens, other.num_filled) == (7, 8)
        check(pool, lender, table, other)


class TestRewind:
    """The last token is appended once more: its block holds it, and is neither copied nor written."""

    @pytest.mark.parametrize("num_tokens", [1, 4, 6, 8])
    @pytest.mark.parametrize("is_shared", [False, True])
    def test_last_token_is_stored(self, pool: BlockPool, num_tokens: int, is_shared: bool) -> None:
        table = table_of(pool, num_tokens)
        forks = [table.fork()] if is_shared else []
        blocks, counts = table.blocks, ref_counts(pool)
        table.rewind()
        assert (table.num_tokens, table.num_filled) == (num_tokens - 1, num_tokens)
        check(pool, table, *forks)
        assert BlockTable.append_where_room([table]) == [0]
        assert table.append(1) == TableUpdate(len(blocks), [], is_stored=True)
        assert (table.num_tokens, table.blocks, ref_counts(pool)) == (num_tokens, blocks, counts)
        update = table.append(1)
        has_copy = is_shared and num_tokens % 4 > 0
        assert (update is not None and update.copy is not None) == has_copy
        check(pool, table, *forks)

    def test_retracted_append_of_it_keeps_the_block_that_an_earlier_one_copied(self, pool: BlockPool) -> None:
        table = table_of(pool, 6)
        other = table.fork()
        table.append(1)
        blocks = table.blocks
        table.rewind()
        table.append(1)
        assert not table.retract(6)
        assert (table.blocks, table.num_filled) == (blocks, 7)
        check(pool, table, other)


class TestWork:
    """Work that does not grow with the blocks: calls, not times."""

    @staticmethod
    def num_calls(num_blocks: int, verb: str) -> int:
        pool = BlockPool(num_blocks + 8)
        table = table_of(pool, 4 * num_blocks)
        child = table.fork()
        child.append(1)
        with CountedCalls() as calls:
            match verb:
                case "fork":
                    table.fork()
                case "become":
                    table.become(child)
                case "free":
                    child.free()
                case "begin":
                    BlockTable(pool, 4).begin(table.blocks, table.num_tokens)
        return calls.count

    @pytest.mark.parametrize("verb", ["fork", "become", "free", "begin"])
    def test_shared_blocks_are_no_calls(self, verb: str) -> None:
        assert self.num_calls(4096, verb) == self.num_calls(16, verb)
