"""Tokens that would complete a bad word."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.core.plan import NewRow
from quire.core.sampling_params import SamplingParams
from quire.decoding.bad_words import BadWords
from quire.decoding.sampler import SamplingState

WORDS = st.lists(st.lists(st.integers(0, 3), max_size=4).map(tuple), max_size=8).map(tuple)


def forbidden(words: tuple[tuple[int, ...], ...], output: list[int]) -> list[int]:
    return sorted(set(BadWords(words).forbidden_next(np.array(output, dtype=np.int32)).tolist()))


def test_a_single_token_is_always_forbidden() -> None:
    assert forbidden(((5,), (7,)), []) == [5, 7]
    assert forbidden(((5,),), [5, 5]) == [5]


def test_a_longer_word_is_forbidden_at_its_last_token_only() -> None:
    word = ((1, 2, 3),)
    assert forbidden(word, [1]) == []
    assert forbidden(word, [1, 2]) == [3]
    assert forbidden(word, [1, 2, 3]) == []


def test_nothing_is_forbidden_without_words() -> None:
    assert forbidden((), [1, 2]) == []
    assert forbidden(((),), [1, 2]) == []


@given(WORDS, st.lists(st.integers(0, 3), max_size=6))
def test_exactly_the_tokens_that_complete_a_word_are_forbidden(
    words: tuple[tuple[int, ...], ...], output: list[int]
) -> None:
    completing = {token for token in range(4) for word in words if word and (*output, token)[-len(word) :] == word}
    assert forbidden(words, output) == sorted(completing)


def test_cost_of_a_step_does_not_grow_with_the_words() -> None:
    class Counted(bytes):
        num_compared = 0

        def __lt__(self, other: bytes) -> bool:
            Counted.num_compared += 1
            return bytes(self) < bytes(other)

        def startswith(self, *args: object) -> bool:
            Counted.num_compared += 1
            return super().startswith(*args)  # type: ignore[arg-type]

    words = tuple((*[7] * length, 9, 8) for length in range(1, 1001))
    bad = BadWords(words)
    bad._befores = [Counted(each) for each in bad._befores]
    assert bad.forbidden_next(np.array([9, 7, 7], dtype=np.int32)).tolist() == []
    assert Counted.num_compared == 0, "the last token ends no beginning of a word"
    assert bad.forbidden_next(np.array([1, 3, 9], dtype=np.int32)).tolist() == []
    assert bad.forbidden_next(np.array([7, 9], dtype=np.int32)).tolist() == [8]
    assert Counted.num_compared <= 2 * 12


def test_branches_share_what_is_made_of_the_words() -> None:
    state, words = SamplingState(3, 20), ((1, 2), (3,))
    for row in (0, 1):
        state.set(NewRow(row, [1], 1, [0], SamplingParams(), row, bad_words_token_ids=words))
    state.set(NewRow(2, [1], 1, [0], SamplingParams(), 2, bad_words_token_ids=((1, 2), (4,))))
    assert state.token_lists(0).bad_words is state.token_lists(1).bad_words
    assert state.token_lists(2).bad_words.forbidden_next(np.array([1], dtype=np.int32)).tolist() == [4, 2]
