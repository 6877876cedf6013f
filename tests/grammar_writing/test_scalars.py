"""Numbers that grammars of schemas allow, against jsonschema: those next to the bounds above all."""

import json
import math
import random
from decimal import Decimal
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from quire.grammar_writing.schemas import SchemaError
from quire.grammar_writing.texts import json_text

jsonschema = pytest.importorskip("jsonschema")

BYTES = LLTokenizer("byte")
FRACTIONS, WHOLE = (-10.5, -0.5, 0.25, 0.5, 10.5), (-11, -10, -1, 0, 1, 10, 11)


def allowed(schema: dict[str, Any], texts: set[str]) -> set[str] | None:
    """Return those of the texts that the grammar of a schema allows; None if it allows nothing."""
    matcher = LLMatcher(BYTES, f"start: {json_text(schema)}\n")
    if matcher.is_error():
        return None
    found = set()
    for text in texts:
        tried = matcher.deep_copy()
        if tried.try_consume_tokens(list(text.encode())) == len(text) and tried.is_accepting():
            found.add(text)
    return found


def check(bounds: dict[str, float], near: set[str], inside: list[float]) -> None:
    """Assert that no text is allowed beyond bounds, and that the numbers `inside` are, if they fit."""
    validator = jsonschema.Draft202012Validator(bounds)
    texts = {format(Decimal(repr(number)), "f").removesuffix(".0") for number in inside}
    fitting = {text for text in near | texts if validator.is_valid(json.loads(text))}
    found = allowed({"type": "number"} | bounds, near | texts) or set()
    assert found <= fitting, (bounds, found - fitting)
    assert texts & fitting <= found, (bounds, texts & fitting - found)


def written(value: float) -> set[str]:
    """Return texts of a number, without an exponent."""
    text = format(Decimal(repr(float(value))), "f")
    whole = {text.removesuffix(".0")} if text.endswith(".0") else set()
    return {text, text + "0", *whole, *(("-0", "-0.0") if value == 0 else ())}


def around(*values: float) -> set[str]:
    near = {number for value in values for number in (
        value, math.nextafter(value, math.inf), math.nextafter(value, -math.inf), math.floor(value), math.ceil(value),
    )}  # fmt: skip
    return set().union(*(written(number) for number in near if number == 0 or abs(number) > 1e-60))


@pytest.mark.parametrize("low", ["minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("high", ["maximum", "exclusiveMaximum"])
def test_bounds_of_numbers_hold(low: str, high: str) -> None:
    values = sorted((*FRACTIONS, *WHOLE))
    for least in values:
        for most in values:
            inside = [least, most, (least + most) / 2, 0, -1, -0.25, 0.3, 10.25, 10.001, -10.999]
            check({low: least, high: most}, around(least, most, 0), inside)


@pytest.mark.parametrize("seed", range(4))
def test_random_bounds_hold(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        least = draw.choice([
            draw.randrange(-12, 13), round(draw.uniform(-20, 20), draw.randrange(4)), draw.uniform(-1000, 1000),
            math.nextafter(draw.randrange(1, 10**draw.randrange(1, 9)), draw.choice([0, math.inf])),
        ])  # fmt: skip
        most = least + draw.choice([0, 0.001, 0.25, 0.5, 1, draw.uniform(0, 5), draw.uniform(0, 10_000)])
        low, high = draw.choice(["minimum", "exclusiveMinimum"]), draw.choice(["maximum", "exclusiveMaximum"])
        middle = (least + most) / 2
        check({low: least, high: most}, around(least, most, 0), [middle] if least < middle < most else [])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "exclusiveMinimum": 0, "allOf": [{"maximum": 0.5}]},
        {"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]},
        {"$ref": "#/$defs/positive", "maximum": 0.5, "$defs": {"positive": {"type": "number", "exclusiveMinimum": 0}}},
        {"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, {"type": "null"}]},
    ],
)
def test_bounds_of_several_schemas_for_one_number_hold(schema: dict[str, Any]) -> None:
    assert allowed(schema, {"0", "-0", "0.0", "0.25", "0.5", "0.75", "1"}) == {"0.25", "0.5"}


@pytest.mark.parametrize("value", [0.1, 3.141592653589793, 1e-7, 1.5e-30, 0.30000000000000004])
def test_constants_are_the_numbers_of_the_schema(value: float) -> None:
    text = format(Decimal(repr(value)), "f")
    assert allowed({"const": value}, around(value)) == {text}
    assert allowed({"enum": ["a", [value]]}, {f"[{near}]" for near in around(value)}) == {f"[{text}]"}


def test_what_no_grammar_holds_is_refused() -> None:
    for schema, reason in [
        ({"const": 99.00000000000001}, "at /const: 99.00000000000001 has more digits than grammars hold"),
        ({"minimum": 1e-61}, "at /minimum: 1e-61 is nearer to 0 than 1e-60"),
    ]:
        with pytest.raises(SchemaError, match=reason):
            json_text(schema)
