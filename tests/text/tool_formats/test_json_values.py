"""Tests of the JSON of values that a model writes as text."""

import json

import pytest

from quire.text.tool_formats.tool_format import json_value

NUMBER, STRING = frozenset({"number"}), frozenset({"string"})


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        (" 7 ", NUMBER, 7),
        ('"7"', NUMBER, "7"),
        ('"7"', STRING, '"7"'),
        ("7", STRING, "7"),
        ("True", frozenset({"boolean"}), True),
        ("True", STRING, "True"),
        ("[1]", frozenset(), [1]),
        ("NaN", NUMBER, "NaN"),
        ('" type="777', NUMBER, '" type="777'),
        ('"', NUMBER, '"'),
        ("[" * 100_000, NUMBER, "[" * 100_000),
    ],
)
def test_value_is_json_of_its_types_or_a_string(text: str, types: frozenset[str], expected: object) -> None:
    assert json.loads(json_value(text, types)) == expected
