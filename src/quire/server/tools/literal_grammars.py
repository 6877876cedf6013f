"""Grammars of arguments that are not written as JSON, by the JSON schemas of the tools' parameters."""

from collections.abc import Sequence

from quire.core.structured_outputs import compact_json
from quire.grammar_writing.schema_shapes import Document, Shape
from quire.grammar_writing.schemas import SchemaPart, refuse
from quire.grammar_writing.texts import closed_json_text, literal_text
from quire.server.tools.grammar_rules import GrammarRules, alternatives, enumerated_texts, has_regexes, text_body
from quire.server.tools.object_grammars import ObjectNotation, members_of, object_text
from quire.text.tool_formats.syntax import GEMMA_KEY, PYTHON_KEY

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
