"""The generator of covering tables."""

from itertools import combinations, product

import pytest

from support.pairwise import pairwise


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
