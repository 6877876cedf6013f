"""Shapes of a JSON schema: its values split by type, with references, `allOf` and alternatives resolved.

Notations other than JSON write each type in their own way, so their grammars are made of shapes. A shape is one JSON
type and the flat schemas that its values fit, all of them. What cannot be resolved raises SchemaError with its keyword
and its place: a shape never allows more than the schema.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.core.checks import shown
from quire.core.structured_outputs import compact_json
from quire.grammar_writing.disjoint_schemas import without_disjoint_one_of
from quire.grammar_writing.plain_schemas import plain_schema
from quire.grammar_writing.schemas import NO_SCHEMAS, SCHEMAS_BY_NAME, SchemaPart, escaped_name, referenced, refuse
from quire.grammar_writing.texts import without_named_patterns

MAX_VISITS = 50_000    # schemas visited for one request: some 8 us each
MAX_DEPTH = 64          # references and alternatives inside of each other
MAX_SHAPES = 256        # alternatives of one value
MAX_CHOICES = 32        # lists of alternatives of one value
_UNSUPPORTED = (
    "not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies", "uniqueItems", "contains",
    "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties", "propertyNames", "$dynamicRef",
    "$recursiveRef",
)  # fmt: skip
_OF_TYPES: Mapping[str, tuple[str, ...]] = {  # keywords of shapes of a type; those of other types say nothing of it
    "null": (),
    "boolean": (),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    "object": ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
}
_ENUMERATIONS = ("enum", "const")
_KNOWN = frozenset(key for keys in _OF_TYPES.values() for key in keys) | {*_ENUMERATIONS, "type"}
_CONSTRAINTS = _KNOWN | {*_UNSUPPORTED, "$ref", "allOf", "anyOf", "oneOf"}  # what may constrain a value
_ATOMS = {  # a number is an integer or a fraction
    "null": {"null"}, "boolean": {"boolean"}, "integer": {"integer"}, "number": {"integer", "fraction"},
    "string": {"string"}, "array": {"array"}, "object": {"object"},
}  # fmt: skip
OTHER_NAMES = {  # type names in schemas of tools that were written by hand
    "str": "string", "int": "integer", "float": "number", "double": "number", "bool": "boolean", "dict": "object",
    "list": "array",
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Values of one JSON type (a number may be `integer` or `number`) that fit flat schemas, all of them."""

    kind: str
    parts: tuple[SchemaPart, ...]

    @property
    def place(self) -> str:
        """Return the place of the shape, or of one of its schemas."""
        return self.parts[0].place if self.parts else ""

    def given(self, keyword: str) -> Iterator[tuple[Any, str]]:
        """Yield the values of a keyword, with the places of their schemas."""
        for schema, place in self.parts:
            if keyword in schema:
                yield schema[keyword], place

    def limits(self, low: str, high: str) -> tuple[int, int | None]:
        """Return the least and the greatest count by two keywords; None: no greatest one."""
        least, most = 0, None
        for keyword in (low, high):
            for value, place in self.given(keyword):
                if type(value) is not int or value < 0:
                    refuse(place, f"{keyword} must be a count, got {shown(value)}")
                if keyword == low:
                    least = max(least, value)
                else:
                    most = value if most is None else min(most, value)
        return least, most

    def enumerated(self) -> list[Any] | None:
        """Return the values of enumerations that are of this type, or None if there is no enumeration."""
        found: dict[str, Any] | None = None
        for schema, _ in self.parts:
            for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
                if values is not None:
                    own = {_key(value): value for value in values if self._has(value)}
                    found = own if found is None else {key: found[key] for key in found if key in own}
        return None if found is None else list(found.values())

    def _has(self, value: object) -> bool:
        kind = type_of(value)
        return kind == self.kind or (self.kind == "number" and kind == "integer")

    def keywords(self) -> set[str]:
        """Return the keywords of its schemas but for the type."""
        return {key for schema, _ in self.parts for key in schema if key != "type"}


def _key(value: object) -> str:
    """Return a text that is the same for values that are equal in JSON."""
    return compact_json(int(value) if isinstance(value, float) and value.is_integer() else value)


def type_of(value: object) -> str:
    """Return the JSON type of a value; `integer` for a number without a fraction."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == value // 1 else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


@dataclass
class Budget:
    """Work on the schemas of one request: visits of schemas, at most MAX_VISITS."""

    num_visits: int = 0


class Document:
    """A schema with its references, made plain once. Documents of a request share its budget."""

    def __init__(self, schema: Mapping[str, Any], budget: Budget | None = None) -> None:
        self._budget = budget or Budget()
        self.root = without_named_patterns(without_disjoint_one_of(plain_schema(schema)))
        self._anchors: dict[str, object] | None = None
        self._names: dict[str, str] = {}  # names of definitions, keyed by reference
        self._definitions: dict[str, tuple[Any, set[str]]] = {}  # with the references in them, by their references

    def target(self, part: SchemaPart) -> SchemaPart:
        """Return the schema that a chain of references, without anything beside them, leads to."""
        while isinstance(part.schema, Mapping) and part.schema.keys() & _CONSTRAINTS == {"$ref"}:
            self._visit(part, 0)  # (circles of references alone are no plain schemas)
            part = self._referenced(part)
        return part

    def shapes(self, parts: Sequence[SchemaPart]) -> list[Shape]:
        """Return the shapes of the values that fit some schemas, all of them; empty: no value fits."""
        found: list[Shape] = []
        for flat in self._flat([(part, 0) for part in parts], []):
            for kind in _kinds(flat):
                own = {*_OF_TYPES["number" if kind == "integer" else kind], *_ENUMERATIONS}
                kept = (SchemaPart({k: v for k, v in schema.items() if k in own}, place) for schema, place in flat)
                shape = Shape(kind, tuple(part for part in kept if part.schema))
                if shape.enumerated() != [] and shape not in found:
                    found.append(shape)
                if len(found) > MAX_SHAPES:
                    refuse(parts[0].place, f"more than {MAX_SHAPES} alternatives")
        return found

    def _flat(
        self, waiting: list[tuple[SchemaPart, int]], choices: list[tuple[list[SchemaPart], int]]
    ) -> Iterator[list[SchemaPart]]:
        """Yield each choice of alternatives as the flat schemas that are left."""
        flat: list[SchemaPart] = []
        choices = list(choices)
        while waiting:
            part, depth = waiting.pop(0)
            self._visit(part, depth)
            schema, place = part
            if schema is False:
                return
            if schema is True:
                continue
            if not isinstance(schema, Mapping):
                refuse(place, f"a schema must be an object or a boolean, got {shown(schema)}")
            if unsupported := next((key for key in _UNSUPPORTED if key in schema), None):
                refuse(place, f"unsupported keyword: {unsupported}")
            if "$ref" in schema:
                waiting.append((self._referenced(part), depth + 1))
            for keyword in ("allOf", "anyOf", "oneOf"):
                if keyword in schema:
                    branches = _branches(part, keyword)
                    if keyword == "allOf":
                        waiting += [(branch, depth + 1) for branch in branches]
                    else:
                        choices.append((branches, depth + 1))
            if schema.keys() & _KNOWN:
                flat.append(part)
        if not choices:
            yield flat
            return
        if len(choices) > MAX_CHOICES:
            refuse(choices[-1][0][0].place, f"more than {MAX_CHOICES} lists of alternatives for one value")
        (branches, depth), *others = choices
        for branch in branches:
            yield from self._flat([*((part, 0) for part in _resolved(flat)), (branch, depth)], others)

    def _visit(self, part: SchemaPart, depth: int) -> None:
        self._budget.num_visits += 1
        if self._budget.num_visits > MAX_VISITS:
            refuse(part.place, f"more than {MAX_VISITS} schemas, with those that are referred to")
        if depth > MAX_DEPTH:
            refuse(part.place, f"references or alternatives more than {MAX_DEPTH} levels deep")
        if isinstance(part.schema, Mapping) and "$id" in part.schema and part.schema is not self.root:
            refuse(part.place, "unsupported keyword: $id inside of a schema")

    def _referenced(self, part: SchemaPart) -> SchemaPart:
        reference = part.schema["$ref"]
        found = self._find(reference)
        if found is None:
            refuse(part.place, f"$ref {shown(reference)} names no part of the schema")
        return SchemaPart(found, str(reference).partition("#")[2])

    def _find(self, reference: object) -> object:
        """Return the part that a reference names, by its place or its anchor, or None."""
        if not isinstance(reference, str):
            return None
        reference = "#" + reference.removeprefix(str(self.root.get("$id", ""))).removeprefix("#")
        if reference == "#" or reference.startswith("#/"):
            return referenced(self.root, reference)
        if self._anchors is None:
            self._anchors = {f"#{schema['$anchor']}": schema for schema in _anchored(self.root)}
        return self._anchors.get(reference)

    def alone(self, shapes: Sequence[Shape]) -> dict[str, Any]:
        """Return a JSON schema of the values of some shapes, with the definitions that it refers to and no others."""
        found: set[str] = set()
        options = [{"type": shape.kind} | self._merged(shape, found) for shape in shapes]
        return self._with_definitions(options[0] if len(options) == 1 else {"anyOf": options}, found)

    def whole(self) -> Any:  # noqa: ANN401 (JSON)
        """Return the schema with the definitions that it refers to and no others."""
        found: set[str] = set()
        schema = self._rewritten(self.root, "", found)
        return self._with_definitions(schema | _own_options(self.root), found)

    def _merged(self, shape: Shape, found: set[str]) -> dict[str, Any]:
        schemas = [self._rewritten(part.schema, part.place, found) for part in shape.parts]
        return schemas[0] if len(schemas) == 1 else {"allOf": schemas} if schemas else {}

    def _with_definitions(self, schema: dict[str, Any], found: set[str]) -> dict[str, Any]:
        definitions = {}
        waiting = sorted(found)
        while waiting:
            reference = waiting.pop()
            definition, below = self._definition(reference)
            definitions[self._names[reference]] = definition
            waiting += sorted(below - found)
            found |= below
        return schema | {"$defs": definitions} if definitions else schema

    def _definition(self, reference: str) -> tuple[Any, set[str]]:
        if reference not in self._definitions:
            below: set[str] = set()
            self._definitions[reference] = (
                self._rewritten(self._find(reference), reference.partition("#")[2], below), below
            )
        return self._definitions[reference]

    def _rewritten(self, schema: Any, place: str, found: set[str]) -> Any:  # noqa: ANN401 (JSON)
        """Return a schema without annotations, with references to definitions; add those to `found`."""
        self._visit(SchemaPart(schema, place), 0)
        if isinstance(schema, list):
            return [self._rewritten(each, f"{place}/{index}", found) for index, each in enumerate(schema)]
        if not isinstance(schema, Mapping):
            return schema
        result: dict[str, Any] = {}
        for key in filter(_CONSTRAINTS.__contains__, schema):
            value, below = schema[key], f"{place}/{key}"
            if key in SCHEMAS_BY_NAME and isinstance(value, Mapping):
                result[key] = {
                    name: self._rewritten(each, f"{below}/{escaped_name(name)}", found) for name, each in value.items()
                }
            else:
                result[key] = value if key in NO_SCHEMAS else self._rewritten(value, below, found)
        if "$ref" in result:
            self._referenced(SchemaPart(result, place))
            found.add(result["$ref"])
            self._names.setdefault(result["$ref"], f"d{len(self._names)}")
            result["$ref"] = f"#/$defs/{self._names[result['$ref']]}"
        return result


def _resolved(parts: Sequence[SchemaPart]) -> list[SchemaPart]:
    """Return schemas without what was resolved: references and alternatives."""
    return [SchemaPart({key: part.schema[key] for key in part.schema if key in _KNOWN}, part.place) for part in parts]


def _own_options(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"x-guidance": schema["x-guidance"]} if "x-guidance" in schema else {}


def _anchored(schema: object) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of JSON that have an anchor."""
    for below in schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ():
        yield from _anchored(below)
    if isinstance(schema, Mapping) and isinstance(schema.get("$anchor"), str):
        yield schema


def _branches(part: SchemaPart, keyword: str) -> list[SchemaPart]:
    branches = part.schema[keyword]
    if not isinstance(branches, list) or not branches:
        refuse(part.place, f"{keyword} must be a list of schemas, got {shown(branches)}")
    if keyword == "oneOf":
        refuse(part.place, "unsupported keyword: oneOf with branches that may both fit; write anyOf")
    return [SchemaPart(branch, f"{part.place}/{keyword}/{number}") for number, branch in enumerate(branches)]


def _kinds(parts: Sequence[SchemaPart]) -> list[str]:
    """Return the JSON types that flat schemas allow."""
    atoms = set().union(*_ATOMS.values())
    for schema, place in parts:
        if "type" in schema:
            written = schema["type"]
            names = [OTHER_NAMES.get(str(name), str(name)) for name in written] if isinstance(written, list) else [
                OTHER_NAMES.get(str(written), str(written))
            ]  # fmt: skip
            if unknown := next((name for name in names if name not in _ATOMS), None):
                refuse(place, f"unknown type {shown(unknown)}")
            atoms &= set().union(*(_ATOMS[name] for name in names))
        for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
            if values is not None:
                if not isinstance(values, list):
                    refuse(place, f"enum must be a list, got {shown(values)}")
                kinds = {type_of(value) for value in values}
                atoms &= {"fraction" if kind == "number" else kind for kind in kinds}
    if "fraction" in atoms:
        atoms = atoms - {"integer", "fraction"} | {"number"}
    return [kind for kind in _ATOMS if kind in atoms]
