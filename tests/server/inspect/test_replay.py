"""Operations replayed on a small cache: the worked example, copies, refusals, and invalid operations."""

from collections.abc import Sequence

import pytest

from quire.core.errors import InvalidRequestError
from quire.server.inspect.replay import MAX_OPERATIONS, Append, Fork, Free, New, Operation, Replay, Write, replay


def figures(state: Replay) -> tuple[int, int, int, int]:
    stats = state.stats
    return stats.free_blocks, stats.used_blocks, stats.shared_blocks, stats.num_sequences


def counts(state: Replay) -> dict[int, int]:
    return {entry.block: entry.ref_count for entry in state.blocks if entry.ref_count}


@pytest.mark.parametrize(("num_tokens", "num_used"), [(10, 8), (17, 12), (32, 12)])
def test_t6_is_what_the_lesson_says(num_tokens: int, num_used: int) -> None:
    operations: list[Operation] = [New(), Append(0, 64)]
    state = replay(operations)
    assert figures(state) == (60, 4, 0, 1)
    assert state.sequences == [(0, 64, [0, 1, 2, 3])]
    operations += [Fork(0)] * 3
    assert figures(replay(operations)) == (60, 4, 4, 4)
    assert counts(replay(operations)) == dict.fromkeys(range(4), 4)
    operations += [Append(sequence, num_tokens) for sequence in range(4)]
    state = replay(operations)
    assert figures(state) == (64 - num_used, num_used, 4, 4)
    assert state.stats.copied_blocks == 0
    operations += [Free(sequence) for sequence in range(4)]
    assert figures(replay(operations)) == (64, 0, 0, 0)


def test_write_copies_a_shared_block_that_has_room_and_no_other() -> None:
    state = replay([New(), Append(0, 20), Fork(0), Write(0), Write(1), Append(0, 11), Write(0)])
    assert state.stats.copied_blocks == 1
    assert [table for _, _, table in state.sequences] == [[0, 2, 3], [0, 1]]
    assert state.outcomes == [
        "an empty sequence: it holds no block",
        "took blocks 0, 1",
        "shares all 2 blocks; none is taken, none is copied",
        "block 1 was shared: copied to 2 before the write",
        "written in place: the last block had room and has one owner",
        "written in place: the last block had room and has one owner",
        "took block 3",
    ]


def test_what_does_not_fit_is_refused_whole_and_told() -> None:
    begun: list[Operation] = [New(), Append(0, 800), New(), Append(1, 200)]
    state = replay([*begun, Append(1, 100)])
    assert state.outcomes[-1] == "refused: need 6 blocks, 1 of 64 are free; nothing has changed"
    assert (state.blocks, state.sequences) == (replay(begun).blocks, replay(begun).sequences)


def test_numbers_of_sequences_are_not_used_twice() -> None:
    state = replay([New(), Free(0), New(), Fork(1)])
    assert [sequence for sequence, _, _ in state.sequences] == [1, 2]
    assert state.outcomes[1] == "let go of 0 blocks; 0 of them are free now"


@pytest.mark.parametrize(
    ("operations", "param"),
    [
        ([Append(0, 1)], "operations[0]"),
        ([New(), Fork(-1)], "operations[1]"),
        ([New(), Free(0), Write(0)], "operations[2]"),
        ([New()] * (MAX_OPERATIONS + 1), "operations"),
    ],
    ids=["unknown", "negative", "freed", "too many"],
)
def test_what_cannot_be_meant_is_named(operations: Sequence[Operation], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        replay(operations)
    assert refused.value.param == param
    assert param in str(refused.value)


def test_as_much_as_may_be_asked_is_answered() -> None:
    state = replay([New(), Append(0, 1024), *[Fork(0)] * (MAX_OPERATIONS - 2)])
    assert figures(state) == (0, 64, 64, MAX_OPERATIONS - 1)
