"""Schemas without keywords that constrain nothing: JSON Schema 2020-12, sections 6 to 9 of the validation vocabulary.

A `format` that is not known is an annotation, and `propertyNames` that every name fits says nothing. Both are dropped
with a warning in the log. Other `propertyNames` become properties, or patterns of properties, which grammars have.
`nullable: true` beside a type is OpenAPI 3.0's null, unless `$schema` names another language.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from quire.core.checks import shown
from quire.grammar_writing.scalars import FORMATS, check_numbers, has_fraction, with_inclusive_bounds
from quire.grammar_writing.schemas import SchemaPart, parts_below, referenced, refuse, rewritten_below

log = logging.getLogger(__name__)

MAX_REFERENCES = 32  # to references alone
MAX_LOOKS = 20_000   # at schemas, for circles of references
ANNOTATIONS = frozenset((
    "title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema",
    "$defs", "definitions",
))  # fmt: skip
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_LENGTHS = ("minLength", "maxLength")

Schema = dict[str, Any]
_IDLE: Mapping[str, Callable[[Any, Schema], bool]] = {  # keywords, and the values with which they say nothing
    "uniqueItems": lambda value, _: value is False,
    "not": lambda value, _: value is False,
    "if": lambda _, schema: not schema.keys() & {"then", "else"},
    "then": lambda _, schema: "if" not in schema,
    "else": lambda _, schema: "if" not in schema,
    "dependentRequired": lambda value, _: value == {},
    "dependentSchemas": lambda value, _: value == {},
    "dependencies": lambda value, _: value == {},
    "contains": lambda _, schema: schema.get("minContains") == 0 and "maxContains" not in schema,
    "minContains": lambda value, schema: "contains" not in schema or value == 0,
    "maxContains": lambda _, schema: "contains" not in schema,
    "unevaluatedItems": lambda value, _: value is True or value == {},
    "unevaluatedProperties": lambda value, _: value is True or value == {},
    "additionalItems": lambda _, schema: not isinstance(schema.get("items"), list),
}


def plain_schema(schema: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return a schema that the same values fit, without what constrains nothing. Linear in its size.

    SchemaError for what no grammar holds, and llguidance does not refuse.
    """
    root = schema if isinstance(schema, Mapping) else {}
    _check(SchemaPart(schema, ""), root, _Circles(root))
    has_near_bounds = _has_fraction(SchemaPart(schema, ""))

    def plain(part: Any) -> Any:  # noqa: ANN401 (JSON)
        below = rewritten_below(part, plain)
        if not isinstance(below, dict):
            return below
        result = _plain_keywords(below, root)
        return with_inclusive_bounds(result) if has_near_bounds else result

    return plain(schema)


def _check(part: SchemaPart, root: Mapping[str, Any], circles: "_Circles") -> None:
    """Raise SchemaError for what no grammar holds: numbers, counts of free names, which may repeat, endless circles."""
    schema, place = part
    if isinstance(schema, Mapping):
        check_numbers(schema, place)
        least, required = schema.get("minProperties"), schema.get("required")
        num_required = len(required) if isinstance(required, list) else 0
        is_open = schema.get("additionalProperties", True) is not False or bool(schema.get("patternProperties"))
        if isinstance(least, int | float) and least > num_required + 1 and is_open:
            refuse(place, f"unsupported keyword: minProperties {shown(least)} of properties with any names")
        target: object = schema
        for _ in range(MAX_REFERENCES):
            if not isinstance(target, Mapping) or target.keys() - ANNOTATIONS != {"$ref"}:
                break
            target = referenced(root, target["$ref"])
        else:
            refuse(place, f"$ref {shown(schema['$ref'])} leads to more than {MAX_REFERENCES} others")
        if "$ref" in schema and circles.is_endless(schema):
            refuse(place, f"$ref {shown(schema['$ref'])} leads back to itself in each value that would fit")
    for below in parts_below(part):
        _check(below, root, circles)


def _has_fraction(part: SchemaPart) -> bool:
    """Return whether a bound of some schema in a part is no integer."""
    return has_fraction(part.schema) or any(_has_fraction(below) for below in parts_below(part))


class _Circles:
    """References of a schema that lead back to themselves. The search is bounded: past MAX_LOOKS none is found."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._ending = set[int]()  # schemas that some finite value fits, by their identities
        self._num_left = MAX_LOOKS

    def is_endless(self, schema: object, above: frozenset[int] = frozenset()) -> bool:
        """Return whether each value that fits a schema has one in it that fits a schema above, and so on."""
        self._num_left -= 1
        is_bounded = len(above) <= MAX_REFERENCES and self._num_left >= 0
        if not isinstance(schema, Mapping) or id(schema) in self._ending or not is_bounded:
            return False
        if id(schema) in above:
            return True
        below = above | {id(schema)}
        any_of = schema.get("anyOf")
        if any(self.is_endless(part, below) for part in self._needed(schema)) or (
            isinstance(any_of, list) and any_of and all(self.is_endless(part, below) for part in any_of)
        ):
            return True
        self._ending.add(id(schema))
        return False

    def _needed(self, schema: Mapping[str, Any]) -> Iterator[object]:
        """Yield the schemas that a part of each value fits, or the value itself."""
        yield referenced(self._root, schema.get("$ref"))
        all_of, named, required = schema.get("allOf"), schema.get("properties"), schema.get("required")
        yield from all_of if isinstance(all_of, list) else ()
        if schema.get("type") == "object" and isinstance(named, Mapping) and isinstance(required, list):
            yield from (named.get(name) for name in required if isinstance(name, str))
        if schema.get("type") == "array" and schema.get("minItems"):
            yield schema.get("items")


def _plain_keywords(schema: Schema, root: Mapping[str, Any]) -> Schema:
    result = {key: value for key, value in schema.items() if key not in _IDLE or not _IDLE[key](value, schema)}
    for key in _COUNTS:
        if isinstance(count := result.get(key), float) and count.is_integer():
            result[key] = int(count)
    if isinstance(values := result.get("enum"), list):
        result["enum"] = [_integral(value) for value in values]
    if "const" in result:
        result["const"] = _integral(result["const"])
    types = schema.get("type")
    if result.pop("nullable", None) is True and "$schema" not in root and isinstance(types, str | list):
        result["type"] = list(dict.fromkeys([*([types] if isinstance(types, str) else types), "null"]))
    written = result.get("format")
    if isinstance(written, str) and written not in FORMATS:
        del result["format"]
        _warn(f"format {shown(written)} has no meaning in JSON Schema 2020-12 that is enforced: it constrains nothing")
    return _without_names(result, root) if "propertyNames" in result else result


def _integral(value: object) -> object:
    """Return a number without a fraction as an integer: 1.0 is 1 in JSON Schema, and is written as 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _without_names(schema: Schema, root: Mapping[str, Any]) -> Schema:
    """Return a schema of an object without its `propertyNames`, or as it is if that cannot be written otherwise."""
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    names = _schema_of_names(schema["propertyNames"], root)
    if names is True:
        _warn("propertyNames that each name fits constrains nothing")
        return rest
    if names is False:
        return rest | {"maxProperties": 0}
    if not isinstance(names, dict) or rest.get("patternProperties"):
        return schema
    others, named = rest.get("additionalProperties", True), rest.get("properties", {})
    values = [names["const"]] if names.keys() == {"const"} else names.get("enum")
    if isinstance(values, list) and len(names) == 1:
        texts = [value for value in values if isinstance(value, str)]
        outside = dict.fromkeys(named.keys() - set(texts), False)
        return rest | {"properties": {text: named.get(text, others) for text in texts} | outside,
                       "additionalProperties": False}  # fmt: skip
    if named or not (names.keys() == {"pattern"} or names.keys() <= set(_LENGTHS)):
        return schema
    pattern = names.get("pattern", rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$")
    return rest | {"patternProperties": {pattern: others}, "additionalProperties": False}


def _schema_of_names(names: object, root: Mapping[str, Any]) -> object:
    """Return what a schema says of strings: True for nothing, False if none fits, else its keywords about strings."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(names, Mapping) or names.keys() - ANNOTATIONS != {"$ref"}:
            break
        names = referenced(root, names["$ref"])
    if not isinstance(names, Mapping):
        return names
    if names.keys() & {"$ref", "allOf", "anyOf", "oneOf", "not", "if"}:
        return names
    kind = names.get("type", "string")
    if kind != "string" and not (isinstance(kind, list) and "string" in kind):
        return False
    kept = {key: value for key, value in names.items() if key in ("enum", "const", "pattern", *_LENGTHS)}
    if kept.get("minLength") == 0:
        del kept["minLength"]
    if "format" in names:
        _warn(f"format {shown(names['format'])} of names of properties is not enforced")
    return kept or True


@lru_cache(256)
def _warn(text: str) -> None:
    """Log a warning, once as long as it is among the last ones: clients send the same schema with each request."""
    log.warning("%s", text)
