"""Which tokens would complete a bad word."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.decoding.bad_words import BadWords

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
