"""Faults in request bodies: values replaced by junk, dropped, doubled or exchanged, anywhere in the JSON."""

import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**63, 2**64, -(2**70), 10**400),
    *(0.5, -0.0, 1e308, float("nan"), float("-inf")),
    *("", "x", "é🙂", "\0", "\ud800", "null", "y" * 3000, "stop", "model", "{{ 1/0 }}"),
    *([], [[]], [None], [1, "a"], [0] * 200, [[1], [2]], [True], ["a", 1], [1.5], [2**40]),
    *({}, {"a": 1}, {"5": 200}, {"x": {}}, {"type": "text"}, {"role": "user", "content": None}),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401 (JSON)
    """Yield every container of a body with each of its keys."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def mutated_body(rng: random.Random, whole: dict[str, Any], max_changes: int = 3) -> dict[str, Any]:
    """Return a copy of a body with 1 to `max_changes` faults, half of them outside of its tools."""
    body = deepcopy(whole)
    for _ in range(rng.randint(1, max_changes)):
        found = list(places(body))
        if rng.random() < 0.5:
            found = [(at, key) for name in body if name != "tools" for at, key in _below(body, name)]
        (container, key), (other, other_key) = rng.choice(found), rng.choice(found)
        kind = rng.randrange(4)
        if kind == 0 and isinstance(container, dict):
            container.pop(key)
        elif kind == 1 and isinstance(container, list):
            container.insert(key, deepcopy(container[key]))
        elif kind == 2:
            container[key] = deepcopy(other[other_key])
        else:
            container[key] = deepcopy(rng.choice(JUNK))
    return body


def _below(body: dict[str, Any], name: str) -> Iterator[tuple[Any, Any]]:
    """Yield the place of a field, and those inside of it."""
    yield body, name
    if isinstance(body[name], dict | list):
        yield from places(body[name])
