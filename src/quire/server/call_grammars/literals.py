"""Grammars of arguments that are not written as JSON, by the JSON schemas of the tools' parameters."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.core.checks import shown
from quire.core.structured_outputs import compact_json
from quire.grammar_writing.schemas import referenced
from quire.grammar_writing.texts import closed_json_text, json_text, literal_text, regex_text
from quire.server.call_grammars.rules import ANY_TEXT, Rules, alternatives
from quire.server.tool_formats.argument_types import own_types, types_of
from quire.server.tool_formats.syntax import GEMMA_KEY, PYTHON_KEY

Schema = Mapping[str, Any]
NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
_MAX_PARTS = 64
_OF_OTHERS = ("properties", "required", "items", "minLength", "maxLength", "pattern", "$defs", "definitions")
_PYTHON = {"true": '"True"', "false": '"False"', "null": '"None"'}


def within(root: Schema, schema: object) -> dict[str, Any]:
    """Return a part of a schema by itself: with the definitions that it may refer to."""
    if not isinstance(schema, Mapping):
        return {"not": {}} if schema is False else {}
    return {key: root[key] for key in ("$defs", "definitions") if key in root} | dict(schema)


def string_body(schema: Schema, character: str = "(?s:.)") -> str:
    """Return a regular expression of the strings that a schema allows, by its limits and its pattern."""
    if isinstance(schema.get("pattern"), str):
        return _searched(schema["pattern"])
    if "minLength" in schema or "maxLength" in schema:
        return f"/{character}{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/"
    return ANY_TEXT


def _searched(pattern: str) -> str:
    """Return a regular expression of the texts in which a pattern is found; its anchors are those of the text."""
    before = after = "(?s:.*)"
    if not _has_alternatives(pattern):
        if pattern.startswith("^"):
            before, pattern = "", pattern[1:]
        if (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2 and pattern.endswith("$"):
            after, pattern = "", pattern[:-1]
    return regex_text(f"{before}(?:{pattern}){after}")


def _has_alternatives(pattern: str) -> bool:
    """Return whether a pattern has `|` outside of groups."""
    depth = 0
    for piece in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]", pattern, re.DOTALL):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and depth == 0:
            return True
    return False


def choices(schema: Schema) -> list[Any] | None:
    """Return the values of an enumeration, or None."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def string_parts(schema: Schema) -> list[Schema]:
    """Return the parts of a schema that allow strings: itself, what it refers to, or some of its branches."""
    result: list[Schema] = []
    parts: list[object] = [schema]
    for _ in range(_MAX_PARTS):  # a bound: references may form circles
        if not parts:
            break
        part = parts.pop(0)
        if isinstance(part, Mapping):
            if "string" in own_types(part):
                result.append(part)
            for keyword in ("anyOf", "oneOf"):
                branches = part.get(keyword)
                parts += branches if isinstance(branches, list) else []
            parts.append(referenced(schema, part.get("$ref")))
    return result


def properties(schema: Schema, key_pattern: str) -> list[tuple[str, dict[str, Any], bool]]:
    """Return keys, schemas and necessity of an object's properties, without those that cannot be written.

    ValueError for one that is required, and not written as `key_pattern` says.
    """
    names = schema.get("required", ())
    required = {key for key in names if isinstance(key, str)} if isinstance(names, list) else set()
    parts = schema.get("properties")
    parts = dict(parts) if isinstance(parts, Mapping) else {}
    for key in sorted(required - parts.keys()):
        parts[key] = schema.get("additionalProperties", {})
    result = []
    for key, part in parts.items():
        is_written = part is not False and re.fullmatch(key_pattern, key) is not None and key == key.strip()
        if key in required and not is_written:
            raise ValueError(f"requires the property {shown(key)}, which cannot be written in the format of its calls")
        if is_written:
            result.append((key, within(schema, part), key in required))
    return result


def is_open(schema: Schema) -> bool:
    """Return whether a schema of an object names no properties and allows any."""
    return "properties" not in schema and schema.get("additionalProperties", True) is not False


def joined(rules: Rules, parts: Sequence[tuple[str, bool]], separator: str) -> str:
    """Return an expression for parts in their order; those that are not required (False) may be left out."""
    required = [part for part, is_required in parts if is_required]
    between = f"{literal_text(separator)} " if separator else ""
    rest = '""'
    starts = ['""']
    for part, is_required in reversed(parts):
        if not is_required:
            starts.insert(0, f"{part} {rest}")
            rest = rules.add(f"({between}{part})? {rest}")
    return f" {between}".join(required) + f" {rest}" if required else alternatives(starts)


def python_arguments(rules: Rules, schema: Schema) -> str:
    """Return an expression for keyword arguments in Python: JSON is a literal there, but for its three names."""
    if is_open(schema):
        pair = rules.add(f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" {json_text({})}')
        return f'({pair} (", " {pair})*)?'
    parts = []
    for key, part, is_required in properties(schema, PYTHON_KEY):
        types = types_of({"properties": {key: part}} | part, key)
        value = closed_json_text(part)
        if types <= {"boolean", "null"} and types and choices(part) is None:
            names = ["true", "false"] * ("boolean" in types) + ["null"] * ("null" in types)
            value = alternatives([_PYTHON[name] for name in names])
        parts.append((f"{literal_text(key + '=')} {rules.add(value)}", is_required))
    return joined(rules, parts, ", ")


class GemmaValues:
    """Expressions for values in Gemma's notation: keys without quotes, strings in quotes of their own."""

    def __init__(self, rules: Rules, root: Schema, quote: str) -> None:
        self._rules = rules
        self._root = root
        self._quote = quote
        self._referenced: dict[str, str] = {}  # rules of the parts that are referred to

    def object_text(self, schema: Schema) -> str:
        """Return an expression for an object with the schema's properties, or with any."""
        if is_open(schema):
            key = self._rules.add("/[A-Za-z_][A-Za-z0-9_]{0,63}/")
            return f'"{{" ({key} ":" {self._any()} ("," {key} ":" {self._any()})*)? "}}"'
        parts = [
            (f"{literal_text(key + ':')} {self._rules.add(self._value(part))}", is_required)
            for key, part, is_required in properties(schema, GEMMA_KEY)
        ]
        return f'"{{" {joined(self._rules, parts, ",")} "}}"'

    def _value(self, schema: Schema) -> str:
        """Return an expression for the values that a schema allows."""
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference not in self._referenced:
                name = self._referenced[reference] = self._rules.reserve()
                part = referenced(self._root, reference)
                self._rules.define(name, self._value(part if isinstance(part, Mapping) else {}))
            return self._referenced[reference]
        if (values := choices(schema)) is not None:
            return alternatives([self._constant(value) for value in values])
        branches = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(branches, list) and branches:
            return alternatives([self._value(branch) for branch in branches if isinstance(branch, Mapping)])
        kinds = sorted(own_types(schema))
        return alternatives([self._kind(kind, schema) for kind in kinds]) if kinds else self._any()

    def _any(self) -> str:
        """Return an expression for any value."""
        if "" not in self._referenced:
            name = self._referenced[""] = self._rules.reserve()
            kinds = ("string", "number", "boolean", "null", "object", "array")
            self._rules.define(name, alternatives([self._kind(kind, {}) for kind in kinds]))
        return self._referenced[""]

    def _kind(self, kind: str, schema: Schema) -> str:
        if kind == "string":
            text = self._rules.text_before(self._quote, body=string_body(schema))
            return f"{self._rules.literal(self._quote)} {text}"
        if kind == "object":
            return self.object_text(schema)
        if kind != "array":
            return json_text({key: value for key, value in schema.items() if key not in _OF_OTHERS} | {"type": kind})
        items = schema.get("items")
        item = self._rules.add(self._value(items if isinstance(items, Mapping) else {}))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f'"[" {item} ("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}} "]"'
        return more if least else f'({more} | "[" "]")'

    def _constant(self, value: object) -> str:
        """Return an expression for one value."""
        if isinstance(value, str):
            return self._rules.literal(f"{self._quote}{value}{self._quote}")
        if isinstance(value, list):
            inside = ' "," '.join(map(self._constant, value))
            return f'"[" {inside} "]"'
        if isinstance(value, dict):
            inside = ' "," '.join(f"{literal_text(key + ':')} {self._constant(part)}" for key, part in value.items())
            return f'"{{" {inside} "}}"'
        return literal_text(compact_json(value))
