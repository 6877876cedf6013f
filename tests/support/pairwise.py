"""Covering tables: few rows in which any two values of two axes stand together at least once."""

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

NUM_CANDIDATES = 30
is_without_others = False  # conftest.py: the tests of this run leave out those of `make matrix`
Place = tuple[int, int]  # an axis, and a value of it, by number
Pair = tuple[Place, Place]


def pairwise(axes: Sequence[Sequence[Any]], seed: int = 0) -> list[tuple[Any, ...]]:
    """Return few rows with one value of each axis that together hold every pair; the same for the same seed.

    Each row is the best of several that are filled greedily from a pair still missing (Cohen et al. 1997, AETG).
    """
    rng = random.Random(seed)
    places = [[(axis, number) for number in range(len(values))] for axis, values in enumerate(axes)]
    missing = {pair for one, other in combinations(places, 2) for pair in product(one, other)}
    rows = []
    while missing:
        ordered = sorted(missing)
        candidates = [_fill(places, missing, ordered, rng) for _ in range(NUM_CANDIDATES)]
        best = max(candidates, key=lambda row: len(_pairs(row) & missing))
        missing -= _pairs(best)
        rows.append(tuple(axes[axis][number] for axis, number in best))
    return rows


def covering(
    axes: Mapping[str | tuple[str, ...], Sequence[Any]], indirect: Sequence[str] = ()
) -> pytest.MarkDecorator:
    """Parametrize a test with the product of its axes: rows of a covering table, and for `make matrix` all others.

    A run that leaves these out does not make them: they are nearly as many as all its tests. An axis is an argument, or
    a tuple of arguments whose values are tuples. `indirect`: as in pytest. Values are part of the cases' names, so they
    must look the same in every process.
    """
    unnamed = [value for values in axes.values() for value in values if " at 0x" in str(value)]
    assert not unnamed, f"values whose names are addresses: {unnamed}"
    kept = set(pairwise([range(len(values)) for values in axes.values()]))
    cases = [
        pytest.param(
            *(
                each
                for names, values, number in zip(axes, axes.values(), row, strict=True)
                for each in ([values[number]] if isinstance(names, str) else values[number])
            ),
            marks=() if row in kept else pytest.mark.matrix,
            id="-".join(str(values[number]) for values, number in zip(axes.values(), row, strict=True)),
        )
        for row in product(*(range(len(values)) for values in axes.values()))
        if row in kept or not is_without_others
    ]
    arguments = [each for names in axes for each in ([names] if isinstance(names, str) else names)]
    return pytest.mark.parametrize(arguments, cases, indirect=list(indirect))


def leave_others_to_matrix(items: Iterable[pytest.Function], united: Sequence[str]) -> None:
    """Mark all cases of each test with `matrix` but rows of a covering table of its arguments.

    Does for products of fixtures and parametrizations what `covering` does for those that it makes. The arguments of
    `united` are one axis: any two of their values stand together with each value of each other argument.
    """
    tests = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("matrix") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        kept = rows_with_all_pairs([_axes(case.callspec.params, united) for case in cases])
        for number, case in enumerate(cases):
            if number not in kept:
                case.add_marker("matrix")


def rows_with_all_pairs(rows: Sequence[Mapping[str, object]]) -> set[int]:
    """Return the numbers of few rows that together hold each pair of values of two axes that any row holds.

    Each row adds the most of the pairs still missing: of several a random one, the same each time, so that the values
    of further axes are mixed. All rows have the same axes.
    """
    if len(rows[0]) < 2:
        return set(range(len(rows)))
    bits: dict[object, int] = {}  # keyed by pair
    pairs = [sum(1 << bits.setdefault(pair, len(bits)) for pair in combinations(row.items(), 2)) for row in rows]
    missing, kept = (1 << len(bits)) - 1, set[int]()
    numbers = random.Random(0).sample(range(len(rows)), len(rows))
    while missing:
        best = max(numbers, key=lambda number: (pairs[number] & missing).bit_count())
        kept.add(best)
        missing &= ~pairs[best]
    return kept


def _axes(params: Mapping[str, object], united: Sequence[str]) -> dict[str, object]:
    """Return the value of each axis by identity: the cases of a test share the objects, which need no equality."""
    axes: dict[str, object] = {name: id(value) for name, value in params.items()}
    together = [name for name in united if name in axes]
    return axes | {" ".join(united): tuple(axes.pop(name) for name in together)} if together else axes


def _fill(places: list[list[Place]], missing: set[Pair], ordered: list[Pair], rng: random.Random) -> list[Place]:
    """Return a row that begins with one of the missing pairs; each further value is one that adds most of them."""
    chosen = list(rng.choice(ordered))
    for axis in rng.sample(range(len(places)), len(places)):
        if axis in (place[0] for place in chosen):
            continue
        values = rng.sample(places[axis], len(places[axis]))
        chosen.append(max(values, key=lambda value: sum(_pair(value, other) in missing for other in chosen)))
    return sorted(chosen)


def _pairs(row: list[Place]) -> set[Pair]:
    return set(combinations(row, 2))


def _pair(one: Place, other: Place) -> Pair:
    return (one, other) if one < other else (other, one)
