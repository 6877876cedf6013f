"""Arguments of calls in other notations than JSON: their types by JSON schema, grammars, and translation."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from quire.core.structured_outputs import compact_json
from quire.grammar_writing.schema_shapes import OTHER_NAMES, Document, Shape
from quire.grammar_writing.schemas import SchemaPart, referenced, refuse
from quire.grammar_writing.texts import closed_json_text, literal_text
from quire.server.tools.grammar_rules import GrammarRules, alternatives, enumerated_texts, has_regexes, text_body
from quire.server.tools.object_grammars import ObjectNotation, members_of, object_text
from quire.text.tool_formats.reader import SPACE, Reader, Steps, any_of, atoms, kind_of, number_of, sequence
from quire.text.tool_formats.tool_format import GEMMA_KEY, PYTHON_KEY, TYPE_NAMES, json_value, string_text

_PYTHON_NAMES, _GEMMA_NAMES = "[A-Za-z_][A-Za-z0-9_]{0,63}", r"[^:{}\[\],<>|\"'\s]{1,64}"
_PYTHON = {"boolean": ('"True"', '"False"'), "null": ('"None"',)}


def arguments_text(rules: GrammarRules, document: Document, notation: ObjectNotation) -> str:
    """Return an expression for the arguments that a tool takes. ValueError if it takes none that can be written."""
    members = []
    for shape in document.shapes([SchemaPart(document.root, "")]):
        if shape.kind == "object":
            if shape.enumerated() is not None:
                refuse(shape.place, "unsupported keyword: enum of the arguments")
            members.append(members_of(shape))
    names = {key for each in members for key, _, _ in each.named}
    texts = [object_text(rules, each, notation, names) for each in members]
    written = [rules.add(text) for text in texts if text is not None]
    if not written:
        raise ValueError("takes no arguments that can be written in the format of its calls")
    return alternatives(list(dict.fromkeys(written)))


def python_arguments(rules: GrammarRules, document: Document) -> str:
    """Return an expression for keyword arguments in Python: JSON is a literal there, but for its three names."""
    values: dict[tuple[int, ...], str | None] = {}

    def pair(name: str, parts: list[SchemaPart], _: str | None) -> str | None:
        key, parts = _identity(document, parts)
        if key not in values:
            values[key] = _python_value(rules, document, document.shapes(parts))
        value = values[key]
        return None if value is None else f'{name} "=" {value}'

    return arguments_text(rules, document, ObjectNotation(pair, literal_text, ", ", PYTHON_KEY, _PYTHON_NAMES))


def _python_value(rules: GrammarRules, document: Document, shapes: Sequence[Shape]) -> str | None:
    names = [name for shape in shapes if not shape.parts for name in _PYTHON.get(shape.kind, ())]
    others = [shape for shape in shapes if shape.parts or shape.kind not in _PYTHON]
    options = [*names, *([closed_json_text(document.alone(others))] if others else [])]
    return rules.add(alternatives(options)) if options else None


def _identity(document: Document, parts: Sequence[SchemaPart]) -> tuple[tuple[int, ...], list[SchemaPart]]:
    """Return a key that is the same for the same schemas, which the document holds, and the schemas."""
    targets = [document.target(part) for part in parts]
    return tuple(id(part.schema) for part in targets), targets


class GemmaValues:
    """Expressions for values in Gemma's notation: keys without quotes, strings in quotes of their own."""

    def __init__(self, rules: GrammarRules, document: Document, quote: str) -> None:
        self._rules, self._document, self._quote = rules, document, quote
        self._values: dict[tuple[int, ...], tuple[str, bool]] = {}  # rules of values, and if there are any
        self._notation = ObjectNotation(self._pair, literal_text, ",", GEMMA_KEY, _GEMMA_NAMES)

    def arguments(self) -> str:
        """Return an expression for the arguments of a call."""
        return f'"{{" {arguments_text(self._rules, self._document, self._notation)} "}}"'

    def _pair(self, name: str, parts: list[SchemaPart], _: str | None) -> str | None:
        value = self._value(parts)
        return None if value is None else f'{name} ":" {value}'

    def _value(self, parts: Sequence[SchemaPart]) -> str | None:
        """Return the rule of the values that fit some schemas; None if none can be written."""
        key, parts = _identity(self._document, parts)
        if key not in self._values:
            name = self._rules.reserve()
            self._values[key] = name, True  # (in itself, a value is taken for one that can be written)
            options = [self._shape(shape) for shape in self._document.shapes(parts)]
            written = [option for option in options if option is not None]
            self._values[key] = name, bool(written)
            self._rules.define(name, alternatives(written) if written else '"" "\\u0000"')
        name, is_written = self._values[key]
        return name if is_written else None

    def _shape(self, shape: Shape) -> str | None:
        match shape.kind:
            case "string":
                return self._string(shape)
            case "object" | "array" if shape.enumerated() is not None:
                return self._constants(shape)
            case "object":
                inside = object_text(self._rules, members_of(shape), self._notation)
                return None if inside is None else f'"{{" {inside} "}}"'
            case "array":
                return self._array(shape)
            case _:
                return closed_json_text(self._document.alone([shape]))

    def _string(self, shape: Shape) -> str | None:
        quote = self._rules.literal(self._quote)
        texts = enumerated_texts(shape)
        if texts is None:
            return f"{quote} {self._rules.text_before(self._quote, body=text_body(self._rules, shape, None))}"
        texts = [text for text in texts if self._quote not in text]
        if not texts:
            return None
        if has_regexes(shape):
            return f"{quote} {text_body(self._rules, shape, texts)} {quote}"
        return f"{quote} {self._rules.one_of(texts)} {quote}"

    def _array(self, shape: Shape) -> str | None:
        """Return an expression for arrays: items in front by their places, then others."""
        least, most = shape.limits("minItems", "maxItems")
        num_first = max((len(_first_items(part)) for part in shape.parts), default=0)
        items: list[str] = []
        for index in range(num_first):
            item = self._value(_items(shape, index))
            if item is None:
                most = index if most is None else min(most, index)
                break
            items.append(item)
        other = self._value(_items(shape, num_first))
        if other is None:
            most = num_first if most is None else min(most, num_first)
        if most is not None and least > most:
            return None
        if most == 0:
            return '"[" "]"'
        rest = '""'
        if other is not None and (most is None or most > len(items)):
            items = items or [other]
            if most is None or most > len(items):
                bounds = f"{{{max(least - len(items), 0)},{'' if most is None else most - len(items)}}}"
                rest = f'("," {other}){bounds}'
        for index in reversed(range(1, len(items) if most is None else min(len(items), most))):
            rest = self._rules.add(f'"," {items[index]} {rest}' + (" | " if index >= least else ""))
        first = f"{items[0]} {rest}"
        return f'"[" {first} "]"' if least else f'("[" {first} "]" | "[" "]")'

    def _constants(self, shape: Shape) -> str | None:
        """Return an expression for the arrays or objects of an enumeration."""
        if others := shape.keywords() - {"enum", "const"}:
            refuse(shape.place, f"unsupported keywords: enum of {shape.kind}s beside {', '.join(sorted(others))}")
        options = [self._constant(value) for value in shape.enumerated() or ()]
        written = [option for option in options if option is not None]
        return alternatives(written) if written else None

    def _constant(self, value: object) -> str | None:
        """Return an expression for one value; None if it cannot be written."""
        if isinstance(value, str):
            return None if self._quote in value else self._rules.literal(f"{self._quote}{value}{self._quote}")
        if not isinstance(value, list | dict):
            return literal_text(compact_json(value))
        parts: list[str | None]
        if isinstance(value, list):
            parts = [self._constant(part) for part in value]
        else:
            if not all(map(self._notation.can_write, value)):
                return None
            parts = [_after(literal_text(f"{key}:"), self._constant(part)) for key, part in value.items()]
        if None in parts:
            return None
        start, end = ('"["', '"]"') if isinstance(value, list) else ('"{"', '"}"')
        return " ".join([start, ' "," '.join(part for part in parts if part), end])


def _after(first: str, second: str | None) -> str | None:
    return None if second is None else f"{first} {second}"


def _first_items(part: SchemaPart) -> Sequence[object]:
    """Return the schemas of the items in front, which have places."""
    for keyword in ("prefixItems", "items"):
        if isinstance(part.schema.get(keyword), list):
            return part.schema[keyword]  # type: ignore[no-any-return]
    return ()


def _items(shape: Shape, index: int) -> list[SchemaPart]:
    """Return the schemas that the item at a place fits."""
    found = []
    for part in shape.parts:
        first = _first_items(part)
        keyword = "additionalItems" if first and isinstance(part.schema.get("items"), list) else "items"
        if index < len(first):
            found.append(SchemaPart(first[index], f"{part.place}/{index}"))
        elif keyword in part.schema:
            found.append(SchemaPart(part.schema[keyword], f"{part.place}/{keyword}"))
    return found


MAX_DEPTH = 64  # depth of brackets
_ANY: frozenset[str] = frozenset()
_COLON = any_of(sequence("colon", [SPACE, ":"]))
_ARRAY_END = any_of(sequence("close", [SPACE, r"[\])]"]))
_ARRAY_NEXT = any_of(sequence("next", [SPACE, ","]), sequence("close", [SPACE, r"[\])]"]))
_HEX = "[0-9a-fA-F]"
_ESCAPES = [
    *(sequence(f"escape__{n}", [r"\\", letter, *[_HEX] * n]) for letter, n in (("x", 2), ("u", 4), ("U", 8))),
    sequence("escape__1", [r"\\", r"[\s\S]"]),
]
_ESCAPED = {"n": r"\n", "t": r"\t", "r": r"\r", "b": r"\b", "f": r"\f", "\n": "", "\\": r"\\", "'": "'", '"': r"\""}


class Notation:
    """Patterns of a notation: how keys, values and strings are written."""

    def __init__(
        self,
        key: str,
        key_end: str,
        close: str,
        bare: str,
        quotes: tuple[str, ...],
        has_escapes: bool,
        has_bare_keys: bool,
    ) -> None:
        strings = [sequence(f"string__{number}", [SPACE, *atoms(quote)]) for number, quote in enumerate(quotes)]
        bare_key = sequence("key", [SPACE, f"(?P<_key>{key})", SPACE, key_end])
        self.arguments = any_of(sequence("close", [SPACE, close]), *(strings if has_bare_keys else []), bare_key)
        self.next_argument = any_of(sequence("next", [SPACE, ","]), sequence("close", [SPACE, close]))
        self.keys = any_of(sequence("close", [SPACE, r"\}"]), *strings, *([bare_key] if has_bare_keys else []))
        self.next_key = any_of(sequence("next", [SPACE, ","]), sequence("close", [SPACE, r"\}"]))
        self.value = any_of(
            *strings,
            sequence("object", [SPACE, r"\{"]),
            sequence("array", [SPACE, r"[\[(]"]),
            sequence("bare", [SPACE, f"(?P<_bare>{bare})"], [[SPACE, r"[,}\])]"]]),
        )
        escapes = _ESCAPES if has_escapes else []
        self.string_ends = [any_of(sequence("quote", atoms(quote)), *escapes) for quote in quotes]


PYTHON = Notation(
    key=PYTHON_KEY, key_end="=", close=r"\)", bare=r"[\w+\-.]{1,400}+", quotes=("'", '"'),
    has_escapes=True, has_bare_keys=False,
)  # fmt: skip
GEMMA = Notation(
    key=GEMMA_KEY, key_end=":", close=r"\}", bare=r"[^,{}\[\]<\s][^,{}\[\]<]{0,255}+",
    quotes=('<|"|>', "<escape>"), has_escapes=False, has_bare_keys=True,
)  # fmt: skip


class Literals:
    """Reads the arguments of one call, from behind their opening bracket on, and writes a JSON object."""

    def __init__(self, reader: Reader, write: Callable[[str], None], notation: Notation) -> None:
        self._reader = reader
        self._write = write
        self._notation = notation

    def arguments(self) -> Steps[bool]:
        """Read up to the bracket that closes the call; False if there is none, or something else is in its place."""
        return self._object(depth=0)

    def _object(self, depth: int) -> Steps[bool]:
        reader, notation = self._reader, self._notation
        keys, following = (notation.keys, notation.next_key) if depth else (notation.arguments, notation.next_argument)
        separator = "{"
        while found := (yield from reader.match(keys)):
            if kind_of(found) == "close":
                break
            self._write(separator)
            separator = ", "
            if kind_of(found) == "key":
                self._write(json.dumps(found["_key"].strip(), ensure_ascii=False))
            elif not (yield from self._string(number_of(found))) or not (yield from reader.match(_COLON)):
                return False
            self._write(": ")
            if not (yield from self._value(depth + 1)):
                return False
            found = yield from reader.match(following)
            if found is None or kind_of(found) == "close":
                break
        if found is not None:
            self._write("}" if separator == ", " else "{}")
        return found is not None

    def _array(self, depth: int) -> Steps[bool]:
        separator = "["
        while (found := (yield from self._reader.match(_ARRAY_END))) is None:
            self._write(separator)
            separator = ", "
            if not (yield from self._value(depth + 1)):
                return False
            found = yield from self._reader.match(_ARRAY_NEXT)
            if found is None:
                return False
            if kind_of(found) == "close":
                break
        self._write("]" if separator == ", " else "[]")
        return True

    def _value(self, depth: int) -> Steps[bool]:
        found = yield from self._reader.match(self._notation.value)
        if found is None or depth > MAX_DEPTH:
            return False
        match kind_of(found):
            case "string":
                return (yield from self._string(number_of(found)))
            case "object":
                return (yield from self._object(depth))
            case "array":
                return (yield from self._array(depth))
        self._write(json_value(found["_bare"].strip(), _ANY))
        return True

    def _string(self, quote: int) -> Steps[bool]:
        """Read a string up to its closing quote."""
        self._write('"')
        while found := (yield from self._reader.copy_until(self._notation.string_ends[quote], self._write_text)):
            if kind_of(found) == "quote":
                self._write('"')
                return True
            self._write(_escaped(found[0]))
        return False

    def _write_text(self, text: str) -> None:
        self._write(string_text(text))


def _escaped(escape: str) -> str:
    """Return what an escape sequence of Python is inside of a JSON string."""
    if len(escape) == 2:
        return _ESCAPED.get(escape[1], string_text(escape))
    code = int(escape[2:], 16)
    if 0xD800 <= code < 0xE000:  # half of a pair: no text by itself
        return f"\\u{code:04x}"
    return string_text(chr(code) if code < 0x110000 else "\ufffd")


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
