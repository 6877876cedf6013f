"""Numbers in schemas that grammars cannot hold: those past 2**53, and bounds that leave out one end of a short range.

llguidance 1.9 holds bounds as float64 and int64, and writes the bare integer of an exclusive bound where both have the
same integer part: with a maximum of 0.5 an exclusive minimum of 0 would allow 0. Such schemas are refused.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from quire.core.checks import shown
from quire.grammar_writing.schemas import refuse

MAX_NUMBER = 2**53           # larger integers have neighbours with the same float64
MAX_INT64 = 2**63 - 1        # a maximum from here on excludes no integer that is written
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_MAX_NESTING = 8             # of schemas for the same value


def check_numbers(schema: Mapping[str, Any], place: str) -> None:
    """Raise SchemaError, with the keyword, for a number of this schema that no grammar holds."""
    for key in (*_LOWER, *_UPPER, "multipleOf"):
        value = schema.get(key)
        if _is_number(value) and abs(value) > MAX_NUMBER and not (key in _UPPER and value >= MAX_INT64):
            refuse(f"{place}/{key}", f"{shown(value)} is beyond 2**53, up to which grammars hold numbers")
    for key in ("const", "enum"):
        for value in _numbers(schema.get(key)):
            if abs(value) > MAX_NUMBER:
                refuse(f"{place}/{key}", f"{shown(value)} is beyond 2**53, up to which grammars hold numbers")
    if schema.get("type") != "integer":
        _check_ends(schema, place)


def _check_ends(schema: Mapping[str, Any], place: str) -> None:
    bounds = list(_bounds(schema))
    lower = max((value for key, value in bounds if key in _LOWER), default=None)
    upper = min((value for key, value in bounds if key in _UPPER), default=None)
    if lower is None or upper is None:
        return
    for key, value in bounds:
        is_near = upper < value + 1 if key == "exclusiveMinimum" else lower > value - 1
        if key.startswith("exclusive") and value == int(value) and is_near:
            refuse(f"{place}/{key}", f"{shown(value)} and another bound less than 1 away are not supported together")


def _bounds(schema: object, nesting: int = 0) -> Iterator[tuple[str, float]]:
    """Yield the bounds of a value by keyword, those of all alternatives among them."""
    if not isinstance(schema, Mapping) or nesting == _MAX_NESTING:
        return
    for key in (*_LOWER, *_UPPER):
        if _is_number(value := schema.get(key)) and abs(value) <= MAX_NUMBER:
            yield key, value
    for key in _IN_PLACE:
        for part in schema[key] if isinstance(schema.get(key), list) else ():
            yield from _bounds(part, nesting + 1)


def _numbers(value: object) -> Iterator[float]:
    """Yield all integers, and floats without a fraction, in a JSON value."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _numbers(part)
    elif _is_number(value):
        yield value


def _is_number(value: Any) -> TypeGuard[int | float]:  # noqa: ANN401 (JSON)
    return isinstance(value, int | float) and not isinstance(value, bool)
