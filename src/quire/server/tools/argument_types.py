"""Types of arguments that a model writes as text, by the JSON schema of their tool."""

from collections.abc import Iterator, Mapping
from typing import Any

from quire.grammar_writing.schema_shapes import OTHER_NAMES
from quire.grammar_writing.schemas import referenced
from quire.text.tool_formats.tool_format import TYPE_NAMES

_MAX_SCHEMAS = 64  # looked at for one parameter, and for its object


def types_of(schema: object, key: str) -> frozenset[str]:
    """Return the JSON types that the schema of a tool's parameters allows for one of them; none: nothing is said.

    Where the object's schema has alternatives, the types are those of all.
    """
    parts: list[object] = []
    for part in _with_branches(schema, schema):
        properties, patterns = part.get("properties"), part.get("patternProperties")
        if isinstance(properties, Mapping) and key in properties:
            parts.append(properties[key])
            continue
        parts += patterns.values() if isinstance(patterns, Mapping) else ()
        parts.append(part.get("additionalProperties"))
    types: set[str] = set()
    for below in parts[:_MAX_SCHEMAS]:
        for each in _with_branches(schema, below):
            types |= own_types(each)
    return frozenset(types)


def _with_branches(root: object, schema: object) -> Iterator[Mapping[str, Any]]:
    """Yield a schema, what it refers to and its branches, as far as _MAX_SCHEMAS: references may form circles."""
    parts = [schema]
    for _ in range(_MAX_SCHEMAS):
        if not parts:
            return
        part = parts.pop()
        if isinstance(part, Mapping):
            yield part
            for keyword in ("anyOf", "oneOf", "allOf"):
                branches = part.get(keyword)
                parts += branches[:_MAX_SCHEMAS] if isinstance(branches, list) else []
            parts.append(referenced(root, part.get("$ref")) if isinstance(root, Mapping) else None)


def own_types(part: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names itself."""
    written = part.get("type")
    names = written if isinstance(written, list) else [written]
    types = {OTHER_NAMES.get(name, name) for name in names if isinstance(name, str)}
    if not types and isinstance(part.get("enum"), list):
        types = {TYPE_NAMES[type(value)] for value in part["enum"] if type(value) in TYPE_NAMES}
    if not types and "const" in part:
        types = {TYPE_NAMES[type(part["const"])]}
    if not types and "properties" in part:
        types = {"object"}
    if types and part.get("nullable") is True:  # OpenAPI 3.0
        types.add("null")
    return types
