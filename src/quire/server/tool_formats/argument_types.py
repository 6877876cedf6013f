"""Types of arguments that a model writes as text, by the JSON schema of their tool."""

from collections.abc import Mapping
from typing import Any

from quire.grammar_writing.schemas import referenced

_MAX_SCHEMAS = 64  # that are looked at for one parameter
_OTHER_NAMES = {  # of types in the schemas of tools that were made by hand
    "str": "string", "int": "integer", "float": "number", "double": "number", "bool": "boolean", "dict": "object",
    "list": "array",
}  # fmt: skip
TYPE_NAMES: dict[type, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", dict: "object", list: "array"
}  # fmt: skip


def types_of(schema: object, key: str) -> frozenset[str]:
    """Return the JSON types that the schema of a tool's parameters allows for one of them; none: nothing is said."""
    if not isinstance(schema, Mapping):
        return frozenset()
    properties = schema.get("properties")
    part = properties.get(key) if isinstance(properties, Mapping) else None
    if part is None:
        part = schema.get("additionalProperties")
    types: set[str] = set()
    parts = [part]
    for _ in range(_MAX_SCHEMAS):  # a bound: references may form circles
        if not parts:
            return frozenset(types)
        part = parts.pop()
        if isinstance(part, Mapping):
            types |= own_types(part)
            for keyword in ("anyOf", "oneOf", "allOf"):
                branches = part.get(keyword)
                parts += branches[:_MAX_SCHEMAS] if isinstance(branches, list) else []
            parts.append(referenced(schema, part.get("$ref")))
    return frozenset(types)


def own_types(part: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names itself."""
    written = part.get("type")
    names = written if isinstance(written, list) else [written]
    types = {_OTHER_NAMES.get(name, name) for name in names if isinstance(name, str)}
    if not types and isinstance(part.get("enum"), list):
        types = {TYPE_NAMES[type(value)] for value in part["enum"] if type(value) in TYPE_NAMES}
    if not types and "const" in part:
        types = {TYPE_NAMES[type(part["const"])]}
    if not types and "properties" in part:
        types = {"object"}
    return types
