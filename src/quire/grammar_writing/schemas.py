"""Parts of JSON schemas, their places, and the error of those that cannot be written as a grammar."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn
from urllib.parse import unquote

_MAX_NAMES = 16  # names in one reference
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
NO_SCHEMAS = ("const", "enum", "default", "examples", "required", "x-guidance")


class SchemaError(ValueError):
    """A schema that cannot be written as a grammar, or in a notation; the text begins with the place of the fault."""


class SchemaPart(NamedTuple):
    """A schema, and its place as a JSON pointer."""

    schema: Any
    place: str


def refuse(place: str, problem: str) -> NoReturn:
    """Raise SchemaError for a place."""
    raise SchemaError(f"at {place or '/'}: {problem}")


def parts_below(part: SchemaPart) -> Iterator[SchemaPart]:
    """Yield the schemas directly in a schema."""
    schema, place = part
    if isinstance(schema, list):
        yield from (SchemaPart(each, f"{place}/{index}") for index, each in enumerate(schema))
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        if key in SCHEMAS_BY_NAME and isinstance(value, Mapping):
            yield from (SchemaPart(each, f"{place}/{key}/{escaped_name(name)}") for name, each in value.items())
        elif key not in NO_SCHEMAS and isinstance(value, dict | list):
            yield SchemaPart(value, f"{place}/{key}")


def escaped_name(name: str) -> str:
    """Return a name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def referenced(schema: Mapping[str, Any], reference: object) -> object:
    """Return the part of a schema that a reference into it names, or None."""
    if reference == "#":
        return schema
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    names = reference[2:].split("/")
    part: object = schema if len(names) <= _MAX_NAMES else None
    for name in names[:_MAX_NAMES]:
        key = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and key.isdecimal() and int(key[:9]) < len(part):
            part = part[int(key[:9])]
        else:
            part = part.get(key) if isinstance(part, Mapping) else None
    return part


def rewritten_below(schema: Any, rewrite: Callable[[Any], Any]) -> Any:  # noqa: ANN401 (JSON)
    """Return a schema, or a list of them, with the schemas directly in it rewritten. Names of properties are none."""
    if isinstance(schema, list):
        return [rewrite(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _rewritten_value(key, value, rewrite) for key, value in schema.items()}


def _rewritten_value(key: str, value: Any, rewrite: Callable[[Any], Any]) -> Any:  # noqa: ANN401 (JSON)
    if key in NO_SCHEMAS:
        return value
    if key in SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: rewrite(each) for name, each in value.items()}
    return rewrite(value)
