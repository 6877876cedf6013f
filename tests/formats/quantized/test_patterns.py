"""Patterns of configs: they match as Python's do, are refused where they could take long, and take bounded time."""

import re
import warnings
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.formats.quantized.patterns import PatternError, compile_pattern, matches_start

PATTERNS = [
    *(r".*lm_head", "re", r".*self_attn\.(q|k|v|o)_proj$", r".*\.(?:1[0-5])\..*", r"model\.layers\.[0-9]+\.mlp.*", ""),
    *(r"a{2,3}b?", r"[^a-c]x", r"(ab|a)(c|bc)$", r"\d+\.\w*", r"x*?y", r"^model.*up", r"a||b", r"[]a]b"),
    r"[a\]-]+\s?z",
    *(r"a{2}", r"a{1,}b", r"(?:a?b){0,2}c", r"\[x\]", r"(a|b|)+?c", "$", "^$"),
]
TEXTS = ["lm_head", "model.layers.12.self_attn.q_proj", "model.layers.3.mlp.up_proj", "aab", "aaab", "ab", "dx", "bx",
         "abc", "abcd", "12.x", "xxy", "", "]b", "re", "-] z", "ababc", "[x]", "aaaab"]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_as_pythons_do(pattern: str) -> None:
    for text in TEXTS:
        assert matches_start(pattern, text) == (re.match(pattern, text) is not None), text


@given(st.text("ab|()*+?.[]^${2,}-\\", max_size=8), st.text("ab", max_size=6))
def test_patterns_of_any_kind_match_as_pythons_do_or_are_refused(pattern: str, text: str) -> None:
    try:
        found = matches_start(pattern, text)
    except PatternError:
        return
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # it warns of "[[", for sets in sets one day
        assert found == (re.match(pattern, text) is not None)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(a*)*", "a repetition within a repetition"),
        ("(?:a+|b){2,}", "a repetition within a repetition"),
        ("(?=a)", r"unsupported group \(\?="),
        ("(", r"no \)"),
        ("a)", r"unexpected '\)'"),
        ("a{99}", "is not from 0 to 9"),
        ("a{3,2}", "is not from 0 to 9"),
        ("a{x}", "unsupported quantifier"),
        ("*a", r"nothing to repeat before '\*'"),
        (r"(a)\1", r"unsupported escape \\1"),
        ("[a", "ends too early"),
        ("[b-a]", "empty range b-a"),
        ("a{2", "unsupported quantifier"),
        ("^*", "nothing to repeat"),
        ("(" * 20, "more than 16 groups"),
        ("a" * 600, "more than 512 characters"),
    ],
)
def test_what_is_not_supported_is_refused(pattern: str, words: str) -> None:
    with pytest.raises(PatternError, match=words):
        compile_pattern(pattern)


@pytest.mark.parametrize("pattern", ["(a|a|b)*" * 50 + "$", ".*" * 100 + "x", "(a?){9}" * 60 + "b", "a?" * 200 + "b"])
def test_matching_takes_bounded_time(pattern: str) -> None:
    """A matcher that tried one way after the other would never end."""
    assert not matches_start(pattern, "a" * 60 + "c")


def test_the_end_of_a_match_may_be_restricted() -> None:
    for end, (pattern, is_match) in product([5], [("a+", True), ("a{2}", False)]):
        assert matches_start(pattern, "aaaaa.b", ends=lambda place, end=end: place == end) == is_match
