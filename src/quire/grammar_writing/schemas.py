"""Parts of JSON schemas: those that a reference names, and those below keywords."""

from collections.abc import Callable, Mapping
from typing import Any

_MAX_NAMES = 16  # of one reference
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_NO_SCHEMAS = ("const", "enum", "default", "examples", "required", "x-guidance")


def referenced(schema: Mapping[str, Any], reference: object) -> object:
    """Return the part of a schema that a reference into it names, or None."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    names = reference[2:].split("/")
    part: object = schema if len(names) <= _MAX_NAMES else None
    for name in names[:_MAX_NAMES]:
        part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part


def rewritten_below(schema: Any, rewrite: Callable[[Any], Any]) -> Any:  # noqa: ANN401 (JSON)
    """Return a schema, or a list of them, with the schemas directly in it rewritten. Names of properties are none."""
    if isinstance(schema, list):
        return [rewrite(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _rewritten_value(key, value, rewrite) for key, value in schema.items()}


def _rewritten_value(key: str, value: Any, rewrite: Callable[[Any], Any]) -> Any:  # noqa: ANN401 (JSON)
    if key in _NO_SCHEMAS:
        return value
    if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: rewrite(each) for name, each in value.items()}
    return rewrite(value)
