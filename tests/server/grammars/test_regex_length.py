"""Length of a regex with its repetitions written out."""

import pytest

from quire.server.grammars.grammar_worker import regex_length


@pytest.mark.parametrize(
    ("pattern", "length"),
    [
        ("", 0), ("abc", 3), ("a{5}", 5), ("a{2,7}", 7), ("a{3,}", 3), ("(ab){4}c", 9), ("((a{10}){10}){10}", 1000),
        (r"[abc]{5}", 5), (r"[]{9}]{2}", 2), (r"\{9}", 3), (r"a{,3}", 5), ("(a|b){6}", 18), ("(a{9}", 9), ("a{0}", 1),
    ],
)  # fmt: skip
def test_repeated_parts_count_as_often(pattern: str, length: int) -> None:
    assert regex_length(pattern) == length
