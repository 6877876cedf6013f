"""The generator of covering tables."""

from itertools import combinations, product

import pytest

from support import pairwise as module
from support.pairwise import covering, pairwise, rows_with_all_pairs


@pytest.mark.parametrize("axes", [["ab", "cd"], ["ab", "cde", "f", "ghi"], ["abcdef", "ghij", "klmn", "o", "pq", "rs"]])
def test_every_pair_of_values_stands_in_a_row(axes: list[str]) -> None:
    rows = pairwise(axes)
    for (i, one), (j, other) in combinations(enumerate(axes), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(one, other))


def test_rows_are_few_and_the_same_each_time() -> None:
    axes = [range(7), *[range(4)] * 6, *[range(2)] * 6, range(1)]
    rows = pairwise(axes)
    assert len(rows) < 1.5 * 7 * 4
    assert rows == pairwise(axes) != pairwise(axes, seed=1)


def test_product_is_covered_and_the_rest_is_for_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_without_others", False)
    axes = {"one": "abcd", ("two", "three"): [(1, "x"), (2, "y"), (3, "z")], "four": [None, 0]}
    mark = covering(axes, indirect=["four"])
    names, cases = mark.args
    kept = [case.values for case in cases if not case.marks]
    assert (names, mark.kwargs) == (["one", "two", "three", "four"], {"indirect": ["four"]})
    assert len(cases) == 4 * 3 * 2
    assert len(kept) < len(cases)
    assert {(one, two) for one, two, _, _ in kept} == set(product("abcd", (1, 2, 3)))
    assert {(two, three) for _, two, three, _ in kept} == {(1, "x"), (2, "y"), (3, "z")}
    assert cases[0].id == "a-(1, 'x')-None"
    monkeypatch.setattr(module, "is_without_others", True)
    assert covering(axes).args[1] == [case for case in cases if not case.marks]


def test_rows_of_a_product_that_are_left_hold_all_of_its_pairs() -> None:
    axes = {"one": "abcde", "two": (1, 2, 3), "three": (None, 0), "four": "xyz"}
    rows = [dict(zip(axes, values, strict=True)) for values in product(*axes.values()) if values[:2] != ("e", 3)]
    kept = rows_with_all_pairs(rows)
    assert len(kept) < len(rows) / 3
    for one, two in combinations(axes, 2):
        assert {(rows[n][one], rows[n][two]) for n in kept} == {(row[one], row[two]) for row in rows}
    assert rows_with_all_pairs([{"one": value} for value in "abc"]) == {0, 1, 2}
