"""N-gram drafts: the tokens that followed the longest n-gram at the end of a row, compared with a plain search."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from quire.core.speculation import SpeculationConfig
from quire.execution.batch import PersistentBatch
from quire.execution.drafting.drafters import make_lookup
from quire.extension.isas import usable_isas


@pytest.fixture(params=["C++", "plain"])
def is_native(request: pytest.FixtureRequest) -> bool:
    """Run each test with the lookup in C++ and with its plain form."""
    if request.param == "C++" and not usable_isas():
        pytest.skip("the C++ kernels were not built")
    return bool(request.param == "C++")


def draft(is_native: bool, rows: Sequence[Sequence[int]], *sizes: int, limit: int = 4) -> dict[int, list[int]]:
    """Return the drafts of rows. Behind their tokens are those of earlier rows."""
    batch = PersistentBatch(len(rows), 64, 16, 100)
    batch.token_ids[:] = 7
    for number, row in enumerate(rows):
        batch.token_ids[number, : len(row)] = row
    lookup = make_lookup(SpeculationConfig("ngram", limit, None, *sizes), batch, is_native=is_native)
    return lookup.draft(np.arange(len(rows)), np.array([len(row) - 1 for row in rows]))


def by_definition(row: Sequence[int], min_size: int, max_size: int, limit: int = 4) -> list[int]:
    for size in range(max_size, min_size - 1, -1):
        for end in range(len(row) - 1, size - 1, -1):
            if list(row[end - size : end]) == list(row[len(row) - size :]):
                return list(row[end : end + min(limit, 64 - len(row))])
    return []


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (2, 2), (2, 5), (3, 4), (5, 9)], ids=str)
def test_drafts_are_those_of_a_plain_search(sizes: tuple[int, int], is_native: bool) -> None:
    rng = random.Random(0)
    for kinds in (2, 4, 30):
        rows = [[rng.randrange(kinds) for _ in range(rng.randint(1, 64))] for _ in range(40)]
        expected = {number: found for number, row in enumerate(rows) if (found := by_definition(row, *sizes))}
        assert draft(is_native, rows, *sizes) == expected


def test_the_last_of_several_places_counts(is_native: bool) -> None:
    assert draft(is_native, [[1, 2, 3, 9, 1, 2, 4, 9, 1, 2]], 2, 5) == {0: [4, 9, 1, 2]}


def test_longer_n_gram_counts_more_than_a_later_one(is_native: bool) -> None:
    assert draft(is_native, [[5, 1, 2, 3, 9, 8, 1, 2, 4, 9, 5, 1, 2]], 2, 5) == {0: [3, 9, 8, 1]}
