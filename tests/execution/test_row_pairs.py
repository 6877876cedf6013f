"""Pair filters: no false negatives, few false positives."""

from itertools import pairwise

import numpy as np

from quire.execution.drafting.pairs import RowPairs


def recurs(tokens: list[int]) -> bool:
    pairs = list(pairwise(tokens))
    return bool(pairs) and pairs[-1] in pairs[:-1]


def test_rows_are_found_with_any_number_of_new_tokens() -> None:
    rng = np.random.default_rng(5)
    token_ids = rng.integers(0, 30, (8, 400), dtype=np.int32)
    filters, lengths, num_told = RowPairs(token_ids), np.ones(8, dtype=np.int64), np.zeros(2, dtype=int)
    for step in range(300):
        rows = np.flatnonzero(rng.random(8) < 0.7)
        if step % 40 == 39:
            row = int(rng.integers(8))
            token_ids[row], lengths[row] = rng.integers(0, 30, 400), 1 + rng.integers(60)
            filters.reset([row])
        lengths[rows] = np.minimum(lengths[rows] + rng.integers(0, 5, len(rows)), 400)
        told = set(filters.recurring(rows, lengths[rows]).tolist())
        for place, row in enumerate(rows.tolist()):
            expected = recurs(token_ids[row, : lengths[row]].tolist())
            assert not expected or place in told
            num_told[int(expected)] += place in told
    assert num_told[1] > 10 * num_told[0] > 0


def test_reset_rows_hold_nothing() -> None:
    token_ids = np.array([[1, 2, 1, 2], [1, 2, 1, 2]], dtype=np.int32)
    filters, both = RowPairs(token_ids), np.arange(2)
    assert filters.recurring(both, np.array([4, 4])).tolist() == [0, 1]
    filters.reset([0])
    assert filters.recurring(both, np.array([2, 4])).tolist() == [1]
