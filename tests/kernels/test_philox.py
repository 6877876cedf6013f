"""Philox against its authors' known answers and against plain Python integers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from quire.kernels.sampling import philox4x32, uniforms

UINT64 = st.integers(0, 2**64 - 1)


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """The cipher of Salmon et al. 2011, word by word."""
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & 0xFFFFFFFF,
            (first >> 32) ^ counter[3] ^ key[1],
            first & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers_of_random123(counter: str, key: str, answer: str) -> None:
    counters, keys, answers = (
        np.array([[int(word, 16) for word in words.split()]], dtype=np.uint64) for words in (counter, key, answer)
    )
    assert (philox4x32(counters, keys) == answers).all()


@given(st.lists(st.tuples(UINT64, st.integers(0, 2**63 - 1)), min_size=1, max_size=20))
def test_uniforms_are_the_top_53_bits_of_the_first_two_words(draws: list[tuple[int, int]]) -> None:
    seeds = np.array([seed for seed, _ in draws], dtype=np.uint64)
    numbers = uniforms(seeds, np.array([index for _, index in draws]))
    for number, (seed, index) in zip(numbers.tolist(), draws, strict=True):
        low, high, _, _ = plain_philox([index & 0xFFFFFFFF, index >> 32, 0, 0], [seed & 0xFFFFFFFF, seed >> 32])
        assert number == ((high << 32 | low) >> 11) / 2**53
        assert 0 <= number < 1


def test_uniforms_are_uniform_along_indices_and_along_seeds() -> None:
    count = 100_000
    along_indices = uniforms(np.full(count, 7, dtype=np.uint64), np.arange(count))
    along_seeds = uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, dtype=np.int64))
    for numbers in (along_indices, along_seeds):
        assert stats.kstest(numbers, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / count**0.5
    assert abs(np.corrcoef(along_indices, along_seeds)[0, 1]) < 4 / count**0.5
