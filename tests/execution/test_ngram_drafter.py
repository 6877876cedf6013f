"""N-gram drafts: the tokens that followed the longest n-gram at the end of a row, compared with a plain search."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from quire.execution.drafter import DraftRows
from quire.execution.drafting import ngram
from quire.execution.drafting.ngram import NgramDrafter


def draft(rows: Sequence[Sequence[int]], min_size: int, max_size: int, limit: int = 4) -> dict[int, list[int]]:
    """Return the drafts of rows. Behind their tokens are those of earlier rows."""
    token_ids = np.full((len(rows), 64), 7, dtype=np.int32)
    for number, row in enumerate(rows):
        token_ids[number, : len(row)] = row
    counts = np.array([len(row) for row in rows])
    asked = DraftRows(np.arange(len(rows)), counts, counts - 1, np.full(len(rows), limit))
    return {row: list(found) for row, found in NgramDrafter(token_ids, min_size, max_size).draft(asked).items()}


def by_definition(row: Sequence[int], min_size: int, max_size: int, limit: int = 4) -> list[int]:
    for size in range(max_size, min_size - 1, -1):
        for end in range(len(row) - 1, size - 1, -1):
            if list(row[end - size : end]) == list(row[len(row) - size :]):
                return list(row[end : end + limit])
    return []


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (2, 2), (2, 5), (3, 4), (5, 9)], ids=str)
@pytest.mark.parametrize("searched", [1 << 20, 100, 1])
def test_drafts_are_those_of_a_plain_search(
    sizes: tuple[int, int], searched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngram, "_SEARCHED", searched)
    rng = random.Random(0)
    for kinds in (2, 4, 30):
        rows = [[rng.randrange(kinds) for _ in range(rng.randint(1, 60))] for _ in range(40)]
        expected = {number: found for number, row in enumerate(rows) if (found := by_definition(row, *sizes))}
        assert draft(rows, *sizes) == expected


def test_the_last_of_several_places_counts() -> None:
    assert draft([[1, 2, 3, 9, 1, 2, 4, 9, 1, 2]], 2, 5) == {0: [4, 9, 1, 2]}


def test_longer_n_gram_counts_more_than_a_later_one() -> None:
    assert draft([[5, 1, 2, 3, 9, 8, 1, 2, 4, 9, 5, 1, 2]], 2, 5) == {0: [3, 9, 8, 1]}
