"""JSON schemas for tests of structured output: those of SchemaStore, bounded so that answers end, and random ones."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[2] / "../shared/data/json_schema/schemastore_sample.jsonl.gz"
MAX_LENGTH, MAX_ITEMS, MAX_NUMBER = 6, 2, 99
SHAPES = {"type", "$ref", "anyOf", "allOf", "oneOf", "properties", "items", "additionalProperties", "patternProperties"}
WORDS = ("name", "kind", "size", "owner", "items", "created_at", "is_active", "tags", "metadata", "unit price")


def schemastore() -> list[dict[str, Any]]:
    """Return the schemas of ../shared/data, bounded; skips without them."""
    if not DATA.exists():
        pytest.skip("../shared/data is not here")
    return [bounded(json.loads(line)["schema"]) for line in gzip.decompress(DATA.read_bytes()).splitlines()]


def bounded(schema: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return a schema with short strings, short arrays and small integers where it says nothing of their size."""
    if isinstance(schema, list):
        return [bounded(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    maps = ("properties", "patternProperties", "$defs", "definitions")
    literals = ("enum", "const", "default", "examples", "required")
    inner = {
        key: {name: bounded(each) for name, each in value.items()} if key in maps and isinstance(value, dict)
        else value if key in literals else bounded(value)
        for key, value in schema.items()
    }  # fmt: skip
    if schema.keys() & {"enum", "const", "format"}:
        return inner
    if not schema.keys() & SHAPES:
        return inner | {"type": "boolean"}  # else any JSON, however large
    types = schema.get("type", [])
    if "string" in types and "maxLength" not in schema:
        inner["maxLength"] = max(MAX_LENGTH, schema.get("minLength", 0))
    if "array" in types:
        inner["maxItems"] = max(min(schema.get("maxItems", MAX_ITEMS), MAX_ITEMS), schema.get("minItems", 0))
    if types in ("number", "integer") and not schema.keys() & {"maximum", "exclusiveMaximum"}:
        low = max(schema.get("minimum", 0), schema.get("exclusiveMinimum", 0))
        inner |= {"type": "integer", "minimum": low, "maximum": low + MAX_NUMBER}
    return inner


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return a schema of the kinds that JSONSchemaBench has: function arguments, records, unions, references."""
    schema = _object(rng, depth)
    if rng.random() < 0.3:
        schema["$defs"] = {"part": _object(rng, 1), "label": {"enum": ["low", "high", None]}}
        schema["properties"] |= {"part": {"$ref": "#/$defs/part"}, "label": {"$ref": "#/$defs/label"}}
        schema["required"] = [*schema["required"], "label"]
    return schema


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 5))
    schema = {"type": "object", "properties": {name: _value(rng, depth - 1) for name in names}}
    schema["required"] = [name for name in names if rng.random() < 0.7]
    if rng.random() < 0.7:
        schema["additionalProperties"] = False
    return schema


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 3)
    makers: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 8), "description": "a text"},
        lambda: {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 5000)},
        lambda: {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": rng.randint(2, 100)},
        lambda: {"enum": rng.sample([0.5, "red", "blue", 1, True, None, "dark red", "é", 'a "quoted" word'], 4)},
        lambda: {"const": rng.choice(["v1", 7, False, "a longer constant, forced as one"])},
        lambda: {"type": "string", "pattern": rng.choice([r"^[A-Z]{3}-\d{2}$", r"^(a|bc){1,3}$", r"^\d{4}$"])},
        lambda: {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid"])},
        lambda: {"type": rng.choice(["boolean", "null", ["boolean", "null"]])},
    ]
    if depth > 0:
        makers += [
            lambda: _object(rng, depth),
            lambda: {"type": "array", "items": _value(rng, depth - 1), "minItems": low, "maxItems": 3},
            lambda: {"type": "array", "prefixItems": [_value(rng, 0), _value(rng, 0)], "items": False, "minItems": 2},
            lambda: {"anyOf": [_value(rng, depth - 1), {"type": "boolean"}, {"type": "string", "maxLength": 3}]},
            lambda: {"allOf": [_object(rng, 1), {"type": "object"}]},
        ]
    return rng.choice(makers)()
