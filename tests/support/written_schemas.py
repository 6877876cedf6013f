"""Schemas as their writers make them: pydantic, from models; zod 4 and people, as they were written."""

import datetime
import decimal
import enum
import ipaddress
import pathlib
import uuid
from typing import Annotated, Any, Literal

from pydantic import AnyUrl, BaseModel, ConfigDict, Field, Json, RootModel, SecretStr, StrictInt, TypeAdapter

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def obj(properties: dict[str, Any], required: list[str] | None = None, **others: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the schema of a closed object, all of its properties required unless said otherwise."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False} | others


SHORT = {"type": "string", "maxLength": 4}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
ONE = obj({"x": DIGIT})


def zod_schemas() -> list[tuple[str, Any]]:
    """Return what `z.toJSONSchema` of zod 4 writes, by what it was called with."""
    text = {"type": "string"}
    fields = {
        "record": {"type": "object", "propertyNames": text, "additionalProperties": DIGIT},
        "record of anything": {"type": "object", "propertyNames": text, "additionalProperties": {}},
        "record by enum": {
            "type": "object",
            "propertyNames": text | {"enum": ["a", "b"]},
            "additionalProperties": DIGIT,
            "required": ["a", "b"],
        },
        "partial record": {
            "type": "object",
            "propertyNames": text | {"enum": ["a", "b"]},
            "additionalProperties": DIGIT,
        },
        "record by regex": {
            "type": "object",
            "propertyNames": text | {"pattern": "^k[0-9]$"},
            "additionalProperties": DIGIT,
        },
        "includes": text | {"format": "includes", "pattern": "x", "maxLength": 6},
        "lowercase": text | {"format": "lowercase", "pattern": "^[^A-Z]*$", "maxLength": 6},
        "startsWith": text | {"format": "starts_with", "pattern": "^ab.*", "maxLength": 6},
        "e164": text | {"format": "e164", "pattern": r"^\+[1-9]\d{6,14}$"},
        "ulid": text | {"format": "ulid", "pattern": "^[0-7][0-9A-HJKMNP-TV-Z]{25}$"},
        "nanoid": text | {"format": "nanoid", "pattern": "^[a-zA-Z0-9_-]{21}$"},
        "cuid2": text | {"format": "cuid2", "pattern": "^[0-9a-z]+$"},
        "ipv4": text | {"format": "ipv4"},
        "cidrv4": text
        | {"format": "cidrv4", "pattern": r"^((25[0-5]|[01]?[0-9]{1,2})\.){3}[0-9]\/([0-9]|[1-2][0-9])$"},
        "iso date": text | {"format": "date"},
        "iso time": text | {"format": "time", "maxLength": 12},
        "iso datetime": text | {"format": "date-time"},
        "duration": text | {"format": "duration"},
        "guid": text
        | {
            "format": "uuid",
            "pattern": "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12})$",
        },
        "url": text | {"format": "uri"},
        "base64": text | {"format": "base64", "contentEncoding": "base64", "pattern": "^[0-9a-zA-Z+/]{4}$"},
        "jwt": text | {"format": "jwt"},
        "int": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
        "int32": {"type": "integer", "minimum": -2147483648, "maximum": 2147483647},
        "float": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "multipleOf": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50},
        "tuple": {"type": "array", "prefixItems": [SHORT, DIGIT]},
        "tuple and rest": {"type": "array", "prefixItems": [SHORT], "items": DIGIT},
        "nonempty": {"type": "array", "items": DIGIT, "minItems": 1, "maxItems": 3},
        "nullable": {"anyOf": [SHORT, {"type": "null"}]},
        "union": {"anyOf": [SHORT, DIGIT, {"type": "boolean"}]},
        "literal": {"type": "string", "const": "a b"},
        "literals": {"enum": ["1", 2, None]},
        "native enum": {"type": "number", "enum": [0, 1]},
        "discriminated union": {
            "anyOf": [
                obj({"k": {"type": "string", "const": "a"}, "v": DIGIT}),
                obj({"k": {"type": "string", "const": "b"}}),
            ]
        },
        "intersection": {
            "allOf": [
                {"type": "object", "properties": {"a": DIGIT}, "required": ["a"]},
                {"type": "object", "properties": {"b": SHORT}, "required": ["b"]},
            ]
        },
        "any": {},
        "never": {"not": {}},
        "default": SHORT | {"default": "x"},
        "readonly": SHORT | {"readOnly": True},
    }
    tree = {
        "$schema": DRAFT,
        "$ref": "#/$defs/__schema0",
        "$defs": {"__schema0": obj({"v": DIGIT, "next": {"anyOf": [{"$ref": "#/$defs/__schema0"}, {"type": "null"}]}})},
    }
    root = obj({"v": DIGIT, "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}}) | {"$schema": DRAFT}
    schemas = [(name, obj({"a": field}) | {"$schema": DRAFT}) for name, field in fields.items()]
    optional = obj({"a": SHORT, "b": DIGIT, "c": fields["record"]}, ["b"])
    return [
        *schemas,
        ("lazy", tree),
        ("recursive getter", root),
        ("optional", optional),
        ("record at the top", fields["record"]),
    ]


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Point(BaseModel):
    x: int = Field(ge=0, le=9)
    y: float | None = Field(default=None, gt=0, lt=10)


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["dog"]
    good: bool = True


class Node(BaseModel):
    name: str = Field(max_length=3)
    children: list["Node"] = Field(default=[], max_length=1)


class Strict(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: StrictInt


def pydantic_schemas() -> list[tuple[str, Any]]:
    """Return the schemas that pydantic makes of types and of models."""
    text = Annotated[str, Field(max_length=4)]
    kinds: dict[str, Any] = {
        "model": Point,
        "recursive model": Node,
        "extra allowed": Strict,
        "enum": Color,
        "int enum": Level,
        "tagged union": Annotated[Cat | Dog, Field(discriminator="kind")],
        "union": Cat | Dog | None,
        "optional": text | None,
        "union of scalars": text | int | bool,
        "dict": dict[str, int],
        "dict of any": dict[str, Any],
        "dict by enum": dict[Color, int],
        "dict by literal": dict[Literal["a", "b"], Point],
        "dict by pattern": dict[Annotated[str, Field(pattern="^k[0-9]$")], int],
        "dict by length": dict[Annotated[str, Field(min_length=1, max_length=2)], bool],
        "bounded dict": Annotated[dict[str, int], Field(min_length=1, max_length=2)],
        "list": Annotated[list[Point], Field(max_length=2)],
        "tuple": tuple[int, text, bool],
        "tuple of any length": tuple[int, ...],
        "set": set[int],
        "frozenset of enum": frozenset[Color],
        "date": datetime.date,
        "time": datetime.time,
        "datetime": datetime.datetime,
        "timedelta": datetime.timedelta,
        "decimal": decimal.Decimal,
        "uuid": uuid.UUID,
        "path": pathlib.Path,
        "secret": SecretStr,
        "bytes": bytes,
        "url": AnyUrl,
        "json": Json,
        "ip": ipaddress.IPv4Address,
        "network": ipaddress.IPv6Network,
        "pattern": Annotated[str, Field(pattern=r"^\d{3}-[a-z]+$", max_length=8)],
        "multiple": Annotated[int, Field(multiple_of=3, ge=0, le=30)],
        "literal": Literal["a", 1, None, True],
        "any": Any,
        "complex": complex,
        "nested": dict[str, list[dict[str, text | None]]],
        "root": RootModel[list[Point]],
    }
    return [(name, TypeAdapter(kind).json_schema()) for name, kind in kinds.items()]


def schemas_by_hand() -> list[tuple[str, Any]]:
    """Return schemas with keywords beside and inside of each other, as people write them."""
    pair = {"type": "object", "properties": {"a": DIGIT, "b": SHORT}, "additionalProperties": False}
    fields: dict[str, Any] = {
        "text with pattern, or number": {"anyOf": [{"type": "string", "pattern": "^[0-9]$"}, DIGIT]},
        "text of several types": {"type": ["string", "integer", "boolean", "null", "array", "object"], "maxLength": 3},
        "pattern and lengths": {"type": "string", "pattern": "^a*$", "minLength": 2, "maxLength": 3},
        "several patterns": {"allOf": [{"type": "string", "pattern": "a"}, {"pattern": "b", "maxLength": 5}]},
        "pattern without a type": {"pattern": "^x+$", "maxLength": 5},
        "alternatives in a pattern": {"type": "string", "pattern": "^a|b$", "maxLength": 4},
        "enum and pattern": {"enum": ["ab", "cd", "c"], "type": "string", "pattern": "^c"},
        "enum and length": {"enum": ["ab", "c", ""], "type": "string", "minLength": 2},
        "enum of all types": {
            "enum": ["x", "true", "1", "", " ", "a\nb", "{}", 1, 1.5, True, None, [1, "a"], {"k": "v"}]
        },
        "const of text that is JSON": {"const": "null"},
        "const of an object": {"const": {"a": [1, {"b": None}], "c": "x"}},
        "enum twice": {"enum": ["a", 1, 2], "allOf": [{"enum": [1, "a", 3]}]},
        "siblings of $ref": {"$ref": "#/$defs/text", "maxLength": 2},
        "$ref to a $ref": {"$ref": "#/$defs/alias"},
        "$ref into properties": {"$ref": "#/properties/a/items", "type": "integer"},
        "types of $ref": {"allOf": [{"$ref": "#/$defs/mixed"}, {"type": ["string", "integer"]}]},
        "anyOf beside anyOf": {"anyOf": [SHORT, DIGIT], "allOf": [{"anyOf": [{"type": "integer"}, {"type": "null"}]}]},
        "tuple of fixed length": {
            "type": "array",
            "prefixItems": [DIGIT, {"type": "boolean"}],
            "minItems": 2,
            "maxItems": 2,
        },
        "tuple without rest": {"type": "array", "prefixItems": [DIGIT, SHORT], "items": False},
        "tuple by items of 2020-12": {"type": "array", "items": DIGIT, "maxItems": 2},
        "long tuple": {
            "type": "array",
            "prefixItems": [DIGIT] * 3,
            "items": {"type": "null"},
            "minItems": 2,
            "maxItems": 5,
        },
        "array of nothing": {"type": "array", "items": False},
        "array of arrays": {"type": "array", "items": {"type": "array", "items": DIGIT, "maxItems": 2}, "maxItems": 2},
        "object by allOf": {
            "allOf": [{"properties": {"a": DIGIT}, "required": ["a"]}, {"properties": {"a": {"minimum": 5}}}],
            "type": "object",
        },
        "object by anyOf": {"anyOf": [ONE, obj({"y": {"type": "boolean"}})]},
        "one of two required": pair | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        "at least one": pair | {"minProperties": 1},
        "all": pair | {"minProperties": 2},
        "none": pair | {"maxProperties": 0},
        "at most one": pair | {"maxProperties": 1},
        "map": {"type": "object", "additionalProperties": DIGIT, "minProperties": 1, "maxProperties": 2},
        "map of two": {"type": "object", "additionalProperties": DIGIT, "minProperties": 2},
        "names and others": {
            "type": "object",
            "properties": {"a": SHORT},
            "additionalProperties": DIGIT,
            "required": ["a"],
        },
        "required and not named": {"type": "object", "required": ["z"], "additionalProperties": DIGIT},
        "pattern of names": {"type": "object", "patternProperties": {"^[ab]$": DIGIT}, "additionalProperties": False},
        "pattern of other names": {
            "type": "object",
            "properties": {"k": SHORT},
            "patternProperties": {"^[ab]$": DIGIT},
            "additionalProperties": False,
        },
        "pattern of a name": {
            "type": "object",
            "properties": {"a": SHORT},
            "patternProperties": {"^a$": {"minLength": 2}},
            "additionalProperties": False,
        },
        "no names": {"type": "object", "propertyNames": False},
        "names of a length": {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": DIGIT},
        "property of nothing": {
            "type": "object",
            "properties": {"a": False, "b": DIGIT},
            "additionalProperties": False,
        },
        "formats": {"type": "string", "format": "date", "pattern": "^19"},
        "made up": SHORT | {"format": "color"},
        "email": {"type": "string", "format": "email"},
        "hostname": {"type": "string", "format": "hostname"},
        "ipv6": {"type": "string", "format": "ipv6"},
        "integral float": {"const": 2.0},
        "floats": {"enum": [1.0, 2.5]},
        "count as a float": {"type": "string", "maxLength": 3.0},
        "small numbers": {"type": "number", "minimum": 0, "maximum": 1},
        "unique": {"type": "array", "uniqueItems": True},
        "not unique": {"type": "array", "items": DIGIT, "uniqueItems": False},
        "not": {"not": {"type": "string"}},
        "if": {"if": {"type": "string"}, "then": SHORT},
        "lone then": DIGIT | {"then": False},
        "dependent": pair | {"dependentRequired": {"a": ["b"]}},
        "contains": {"type": "array", "contains": DIGIT},
        "oneOf of types": {"oneOf": [SHORT, DIGIT]},
        "oneOf that overlaps": {"oneOf": [DIGIT, {"type": "integer"}]},
        "unevaluated": pair | {"unevaluatedProperties": False},
        "line breaks": {"enum": ["\na", "b\n", "\n", "c\n\n"]},
        "text with tags": {"enum": ["</parameter>", "</arg_value>", "x</function>", '<|"|>', "plain"]},
    }
    shared = {
        "text": {"type": "string", "maxLength": 5},
        "alias": {"$ref": "#/$defs/text"},
        "mixed": {"anyOf": [SHORT, DIGIT, {"type": "null"}]},
    }
    schemas = [
        (name, obj({"a": field}) | ({"$defs": shared} if "$ref" in str(field) else {}))
        for name, field in fields.items()
    ]
    whole: dict[str, Any] = {
        "$ref": {"$ref": "#/$defs/one", "$defs": {"one": ONE}},
        "anyOf": {"type": "object", "anyOf": [ONE, obj({"y": SHORT})]},
        "allOf": {
            "type": "object",
            "allOf": [{"properties": {"x": DIGIT}, "required": ["x"]}, {"properties": {"y": SHORT}}],
        },
        "map": {"type": "object", "additionalProperties": DIGIT, "minProperties": 1},
        "any": {"type": "object"},
        "alternatives with other types": {
            "type": "object",
            "anyOf": [obj({"v": SHORT}), obj({"v": DIGIT, "w": SHORT})],
        },
        "alternatives, one a map": {
            "type": "object",
            "anyOf": [ONE, {"type": "object", "additionalProperties": SHORT}],
        },
        "siblings": {
            "type": "object",
            "$ref": "#/$defs/one",
            "properties": {"y": SHORT},
            "required": ["y"],
            "$defs": {"one": {"properties": {"x": DIGIT}, "required": ["x"]}},
        },
        "circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "anchor": {"type": "object", "$ref": "#one", "$defs": {"one": ONE | {"$anchor": "one"}}},
        "tuple of draft 7": {"$schema": "http://json-schema.org/draft-07/schema#"}
        | obj({"a": {"type": "array", "items": [DIGIT, {"type": "boolean"}], "additionalItems": False, "minItems": 1}}),
        "nothing": {"type": "object", "properties": {"a": False}, "required": ["a"]},
        "open": {"type": "object", "properties": {"a": DIGIT}, "required": ["a"]},
    }
    return [*schemas, *((f"at the top: {name}", schema) for name, schema in whole.items())]
