"""Proofs that the branches of a `oneOf` in a JSON schema exclude each other: then `anyOf` means the same.

Grammars have alternatives (`anyOf`), but cannot count how many of them fit. Two schemas are disjoint if no value fits
both: by their types, by the values of `const` and `enum`, by ranges of numbers and lengths, or by a property that one
of them requires and for which their schemas are disjoint. What is not proven stays a `oneOf`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import inf
from typing import Any

from quire.grammar_writing.schemas import referenced, rewritten_below

MAX_COMPARISONS = 4096  # pairs of schemas in one document: some 5 us each
MAX_DEPTH = 16  # properties inside of each other that are compared: references may form circles
_TYPES = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
_OF_TYPE = {name: frozenset({name}) for name in _TYPES} | {"number": frozenset({"integer", "fraction"})}
_RANGES = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}

Conjunction = list[Mapping[str, Any]]  # schemas that a value has to fit, all of them


def without_disjoint_one_of(schema: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return a schema with `anyOf` in place of each `oneOf` with branches that are proven to be disjoint."""
    return _Prover(schema).rewritten(schema) if has_one_of(schema) else schema


def has_one_of(schema: object) -> bool:
    """Return whether JSON has `oneOf` as a key anywhere."""
    if isinstance(schema, list):
        return any(map(has_one_of, schema))
    return isinstance(schema, dict) and ("oneOf" in schema or any(map(has_one_of, schema.values())))


class _Prover:
    def __init__(self, root: object) -> None:
        self._root = root if isinstance(root, Mapping) else {}
        self._num_left = MAX_COMPARISONS
        self._depth = 0

    def rewritten(self, schema: Any) -> Any:  # noqa: ANN401 (JSON)
        """Return a schema of the document with each `oneOf` in it replaced, where that is proven to change nothing."""
        result = rewritten_below(schema, self.rewritten)
        if not isinstance(schema, dict):
            return result
        branches = schema.get("oneOf")
        if isinstance(branches, list) and self._are_disjoint(schema, branches):
            alternatives = {"anyOf": result.pop("oneOf")}
            if "anyOf" in result:
                others = result.get("allOf", [])
                alternatives = {"allOf": [*(others if isinstance(others, list) else []), alternatives]}
            result |= alternatives
        return result

    def _are_disjoint(self, schema: Mapping[str, Any], branches: Sequence[Any]) -> bool:
        """Return whether no value that fits the rest of a schema fits two of its branches."""
        rest = {key: value for key, value in schema.items() if key != "oneOf"}
        parts = [self._conjunction([rest, branch]) for branch in branches]
        if len(parts) > 1 and self._have_tags(parts):
            return True
        return all(self._exclude(first, second) for first, second in combinations(parts, 2))

    def _have_tags(self, parts: Sequence[Conjunction | None]) -> bool:
        """Return whether branches are of objects that differ in a property that all require. Linear in the branches."""
        first = parts[0]
        if any(part is not None and _types(part) != _OF_TYPE["object"] for part in parts):
            return False
        for key in list(_required(first))[:16] if first is not None else ():
            seen: set[tuple[str, Any]] = set()
            for part in parts:
                if part is None:
                    continue
                values = _values(self._property(part, key)) if key in _required(part) else None
                if values is None or values & seen:
                    break
                seen |= values
            else:
                return True
        return False

    def _conjunction(self, schemas: Sequence[object]) -> Conjunction | None:
        """Return all schemas that a value of some has to fit, or None if no value fits."""
        found: Conjunction = []
        waiting = list(schemas)
        while waiting and len(found) < 64:
            schema = waiting.pop(0)
            if schema is False:
                return None
            if isinstance(schema, Mapping):
                found.append(schema)
                below = schema.get("allOf")
                waiting += below if isinstance(below, list) else []
                waiting.append(referenced(self._root, schema.get("$ref")))
        return found

    def _exclude(self, first: Conjunction | None, second: Conjunction | None) -> bool:
        """Return whether two conjunctions are proven to be disjoint."""
        if first is None or second is None:
            return True
        self._num_left -= 1
        if self._num_left < 0 or self._depth >= MAX_DEPTH:
            return False
        self._depth += 1
        try:
            return self._exclude_each_other(first, second)
        finally:
            self._depth -= 1

    def _exclude_each_other(self, first: Conjunction, second: Conjunction) -> bool:
        for part, other in ((first, second), (second, first)):
            for index, schema in enumerate(part):
                for keyword in ("anyOf", "oneOf"):
                    branches = schema.get(keyword)
                    if isinstance(branches, list):
                        rest = [*part[:index], _without(schema, keyword), *part[index + 1 :]]
                        return all(self._exclude(self._conjunction([*rest, each]), other) for each in branches)
        values, others = _values(first), _values(second)
        if values is not None and others is not None:
            return not values & others
        return all(self._exclude_as(kind, first, second) for kind in _types(first) & _types(second))

    def _exclude_as(self, kind: str, first: Conjunction, second: Conjunction) -> bool:
        """Return whether no value of one type fits both."""
        least, most = _range(kind, [*first, *second])
        if least > most:
            return True
        if kind == "object":
            keys = list(dict.fromkeys([*_required(first), *_required(second)]))
            return any(self._exclude(self._property(first, key), self._property(second, key)) for key in keys)
        if kind == "array" and least > 0:
            return self._exclude(self._first_item(first), self._first_item(second))
        return False

    def _property(self, part: Conjunction, key: str) -> Conjunction | None:
        """Return what the value of an object's property has to fit."""
        schemas: list[object] = []
        for schema in part:
            named = schema.get("properties")
            if isinstance(named, Mapping) and key in named:
                schemas.append(named[key])
            elif not schema.get("patternProperties"):
                schemas.append(schema.get("additionalProperties"))
        return self._conjunction(schemas)

    def _first_item(self, part: Conjunction) -> Conjunction | None:
        schemas: list[object] = []
        for schema in part:
            items, prefix = schema.get("items"), schema.get("prefixItems")
            tuple_items = prefix if isinstance(prefix, list) else items if isinstance(items, list) else []
            schemas.append(tuple_items[0] if tuple_items else items)
        return self._conjunction(schemas)


def _without(schema: Mapping[str, Any], keyword: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != keyword}


def _required(part: Conjunction) -> Iterator[str]:
    """Yield the properties that a conjunction requires."""
    for schema in part:
        required = schema.get("required")
        yield from (key for key in required if isinstance(key, str)) if isinstance(required, list) else ()


def _types(part: Conjunction) -> frozenset[str]:
    """Return the types that a conjunction allows; `number` is `integer` and `fraction`."""
    allowed = _TYPES
    for schema in part:
        written = schema.get("type")
        kinds = [_OF_TYPE.get(str(name)) for name in (written if isinstance(written, list) else [written])]
        if kinds and None not in kinds:
            allowed &= frozenset[str]().union(*(kind for kind in kinds if kind is not None))
        if (values := _own_values(schema)) is not None:
            allowed &= {kind for kind, _ in values}
    return allowed


def _values(part: Conjunction | None) -> frozenset[tuple[str, Any]] | None:
    """Return the values that a conjunction allows, or more; None if they are not enumerated."""
    if part is None:
        return frozenset()
    enumerated = [values for schema in part if (values := _own_values(schema)) is not None]
    if not enumerated:
        return None
    types = _types(part)
    return frozenset(value for value in frozenset.intersection(*enumerated) if value[0] in types)


def _own_values(schema: Mapping[str, Any]) -> frozenset[tuple[str, Any]] | None:
    """Return the values of `const` and `enum` with their types, or None: lists and objects are not compared."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or any(isinstance(value, list | dict) for value in values):
        return None
    return frozenset((_type_of(value), value) for value in values)


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == value // 1 else "fraction"
    return "string"


def _range(kind: str, part: Conjunction) -> tuple[float, float]:
    """Return the least and the greatest number, or length, that a conjunction allows for values of a type."""
    least, most = -inf, inf
    if kind in _RANGES:
        low, high = _RANGES[kind]
        for schema in part:
            least, most = max(least, _number(schema, low, 0)), min(most, _number(schema, high, inf))
        return least, most
    if kind not in ("integer", "fraction"):
        return least, most
    for schema in part:
        least, most = max(least, _number(schema, "minimum", -inf)), min(most, _number(schema, "maximum", inf))
    above = max((_number(schema, "exclusiveMinimum", -inf) for schema in part), default=-inf)
    below = min((_number(schema, "exclusiveMaximum", inf) for schema in part), default=inf)
    if (above >= most and above > -inf) or (below <= least and below < inf) or (above >= below):
        return inf, -inf
    return least, most


def _number(schema: Mapping[str, Any], keyword: str, default: float) -> float:
    value = schema.get(keyword)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default
