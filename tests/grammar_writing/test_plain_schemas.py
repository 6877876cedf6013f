"""Plain schemas: what constrains nothing is dropped, and names of properties become properties or patterns."""

from typing import Any

import pytest

from quire.grammar_writing.plain_schemas import plain_schema
from quire.grammar_writing.schemas import SchemaError

INTEGER = {"type": "integer"}
MAP = {"type": "object", "additionalProperties": INTEGER}
NODE = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
REFERRED = {"$defs": {"name": {"type": "string", "enum": ["a"]}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string", "format": "color"}, {"type": "string"}),
        ({"type": "string", "format": "date"}, {"type": "string", "format": "date"}),
        ({"properties": {"format": {"format": "x"}}}, {"properties": {"format": {}}}),
        ({"enum": [{"format": "x"}]}, {"enum": [{"format": "x"}]}),
        (MAP | {"propertyNames": {"type": "string"}}, MAP),
        (MAP | {"propertyNames": {"type": "string", "minLength": 0, "description": "d"}}, MAP),
        (MAP | {"propertyNames": True}, MAP),
        (MAP | {"propertyNames": False}, MAP | {"maxProperties": 0}),
        (MAP | {"propertyNames": {"type": "integer"}}, MAP | {"maxProperties": 0}),
        (
            MAP | {"propertyNames": {"enum": ["a", 1]}, "properties": {"b": {}}},
            {"type": "object", "properties": {"a": INTEGER, "b": False}, "additionalProperties": False},
        ),
        (
            MAP | REFERRED | {"propertyNames": {"$ref": "#/$defs/name"}},
            {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": False} | REFERRED,
        ),
        (
            MAP | {"propertyNames": {"pattern": "^k"}},
            {"type": "object", "patternProperties": {"^k": INTEGER}, "additionalProperties": False},
        ),
        (
            MAP | {"propertyNames": {"maxLength": 2}},
            {"type": "object", "patternProperties": {r"^[\s\S]{0,2}$": INTEGER}, "additionalProperties": False},
        ),
        (MAP | {"propertyNames": {"not": {"const": "a"}}}, MAP | {"propertyNames": {"not": {"const": "a"}}}),
        ({"uniqueItems": False, "not": False, "then": {}, "minContains": 1, "unevaluatedItems": True}, {}),
        ({"uniqueItems": True, "contains": {}}, {"uniqueItems": True, "contains": {}}),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, {"minimum": 1e-60, "maximum": 0.5}),
        ({"exclusiveMinimum": 10, "minimum": 9, "maximum": 10.5}, {"minimum": 10.000000000000002, "maximum": 10.5}),
        ({"exclusiveMinimum": -1, "maximum": 0.5}, {"exclusiveMinimum": -1, "maximum": 0.5}),
        ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
        ({"type": ["string", "null"], "nullable": True}, {"type": ["string", "null"]}),
        ({"type": "string", "enum": ["a"], "nullable": True}, {"type": ["string", "null"], "enum": ["a"]}),
        ({"properties": {"nullable": INTEGER | {"nullable": False}}}, {"properties": {"nullable": INTEGER}}),
        ({"anyOf": [INTEGER], "nullable": True}, {"anyOf": [INTEGER]}),
        (INTEGER | {"$schema": "x", "nullable": True}, INTEGER | {"$schema": "x"}),
        ({"maxLength": 2.0, "const": 1.0, "enum": [1.0, 2.5]}, {"maxLength": 2, "const": 1, "enum": [1, 2.5]}),
    ],
)
def test_same_values_fit_a_plain_schema(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert plain_schema(schema) == expected


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#/$defs/n", "$defs": {"n": NODE}}, "at /: .* leads back to itself in each value"),
        ({"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": NODE}}, "at /properties/a: .* back to itself"),
        ({"items": MAP | {"minProperties": 2}}, "at /items: unsupported keyword: minProperties 2"),
        ({"properties": {"a/b": {"$ref": "#/properties/a~1b"}}}, "at /properties/a~1b: .* leads to more than 32"),
        ({"properties": {"id": {"const": 2**53 + 1}}}, r"at /properties/id/const: 9007199254740993 is beyond 2\*\*53"),
        ({"items": {"enum": ["a", [{"b": 2**60}]]}}, "at /items/enum: 1152921504606846976 is beyond"),
        ({"minimum": 2**53 + 1}, "at /minimum: 9007199254740993 is beyond"),
        ({"exclusiveMaximum": 1e18}, "at /exclusiveMaximum: 1e.18 is beyond"),
    ],
)
def test_what_no_grammar_holds_is_refused_with_its_place(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(SchemaError, match=reason):
        plain_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53}, {"enum": [-(2**53), True]}, {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
        {"exclusiveMinimum": 0}, {"exclusiveMinimum": 0, "maximum": 1}, {"exclusiveMinimum": 0.5, "maximum": 1},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5}, {"properties": {"minimum": {"maximum": 3}}},
    ],
)  # fmt: skip
def test_numbers_that_grammars_hold_are_allowed(schema: dict[str, Any]) -> None:
    assert plain_schema(schema) == schema


def test_circles_with_a_way_out_are_allowed() -> None:
    nodes = [
        NODE | {"required": []},
        NODE | {"properties": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}},
        NODE | {"properties": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}},
        NODE | {"type": ["object", "null"]},
    ]
    for node in nodes:
        plain_schema({"$ref": "#/$defs/n", "$defs": {"n": node}})


def test_what_is_dropped_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        plain_schema({"format": "a format that no other test has"})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "'a format that no other test has' has no meaning" in caplog.text
