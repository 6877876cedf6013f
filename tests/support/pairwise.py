"""Few combinations that try every pair."""

import random
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(factors: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return few rows in which any two values of two factors stand together at least once."""
    rows = list(product(*factors))
    random.Random(0).shuffle(rows)
    pairs_of = {row: set(combinations(enumerate(row), 2)) for row in rows}
    missing, chosen = set().union(*pairs_of.values()), []
    while missing:
        chosen.append(max(rows, key=lambda row: len(pairs_of[row] & missing)))
        missing -= pairs_of[chosen[-1]]
    return chosen
