"""Structural tags: free text in which what follows certain markers has a form. Their JSON becomes a grammar.

Two forms of JSON are known: OpenAI's and vLLM's `{"type": "structural_tag", "format": {...}}`, with formats that
contain each other, and the older one with `structures` and `triggers`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from quire.core.checks import shown
from quire.core.errors import InvalidRequestError
from quire.grammar_writing.texts import json_text, literal_text, regex_text

MAX_TAGS = 128              # of one output
MAX_FORMATS = 1024          # in one structural tag
_KINDS = (
    "const_string", "json_schema", "any_text", "regex", "sequence", "or", "tag", "triggered_tags",
    "tags_with_separator",
)  # fmt: skip
_ANY_TEXT = "/(?s:.*)/"

Json = Mapping[str, Any]


def structural_tag_grammar(given: object, whitespace: str | None) -> str:
    """Return the grammar of a structural tag. InvalidRequestError names the place of what is not known.

    `whitespace`: regex of what may stand between two lexemes of JSON; None: nothing.
    """
    if not isinstance(given, Mapping):
        _refuse("", "an object", given)
    return _Formats(whitespace).text(_from_structures(given) if "structures" in given else given.get("format"))


def _from_structures(given: Json) -> Json:
    """Return the format that the older form means."""
    structures = _list_in(given, "structures", "")
    tags = [
        {
            "begin": _text_in(each, "begin", where := f"structures[{index}]"),
            "content": {"type": "json_schema", "json_schema": each.get("schema", True)},
            "end": _text_in(each, "end", where),
        }
        for index, each in enumerate(structures)
    ]
    return {"type": "triggered_tags", "triggers": given.get("triggers"), "tags": tags}


class _Formats:
    """Rules of the formats of one structural tag."""

    def __init__(self, whitespace: str | None) -> None:
        self._whitespace = whitespace
        self._rules: list[str] = []
        self._num_formats = 0

    def text(self, given: object) -> str:
        """Return the whole grammar of a format."""
        start = self._format(given, "format")
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def _rule(self, expression: str, attribute: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attribute}: {expression}")
        return name

    def _format(self, given: object, where: str, end: str = "") -> str:
        """Return an expression for a format and the text that ends it."""
        self._num_formats += 1
        if self._num_formats > MAX_FORMATS:
            message = f"structural_tag must have at most {MAX_FORMATS} formats"
            raise InvalidRequestError(message, param="structural_tag")
        if not isinstance(given, Mapping):
            _refuse(where, "an object with a type", given)
        kind = given.get("type")
        if kind == "any_text":
            return self._rule(_ANY_TEXT, f"[suffix={literal_text(end)}]") if end else _ANY_TEXT
        if kind == "triggered_tags":
            return self._triggered(given, where, end)
        return self._closed_format(kind, given, where) + (f" {literal_text(end)}" if end else "")

    def _closed_format(self, kind: object, given: Json, where: str) -> str:
        """Return an expression for a format with an end that does not depend on what follows."""
        match kind:
            case "const_string":
                expression = literal_text(_text_in(given, "value", where))
            case "json_schema":
                expression = json_text(given.get("json_schema", True), self._whitespace)
            case "regex":
                expression = regex_text(_text_in(given, "pattern", where))
            case "tag":
                expression = self._tag(given, where)
            case "sequence":
                expression = " ".join(self._elements(given, where))
            case "or":
                expression = " | ".join(self._elements(given, where))
            case "tags_with_separator":
                expression = self._separated(given, where)
            case _:
                _refuse(f"{where}.type", f"one of {', '.join(_KINDS)}", kind)
        return self._rule(expression)

    def _elements(self, given: Json, where: str) -> list[str]:
        elements = _list_in(given, "elements", where)
        return [self._format(each, f"{where}.elements[{index}]") for index, each in enumerate(elements)]

    def _separated(self, given: Json, where: str) -> str:
        tags = self._rule(" | ".join(self._tags(given, where)))
        separator = literal_text(_text_in(given, "separator", where))
        several = tags if given.get("stop_after_first") else f"{tags} ({separator} {tags}){{0,{MAX_TAGS - 1}}}"
        return several if given.get("at_least_one") else f"({several})?"

    def _tags(self, given: Json, where: str) -> list[str]:
        tags = _list_in(given, "tags", where)
        return [self._tag(each, f"{where}.tags[{index}]") for index, each in enumerate(tags)]

    def _tag(self, given: object, where: str, num_written: int = 0) -> str:
        """Return an expression for a tag, but for the first characters of its beginning."""
        if not isinstance(given, Mapping):
            _refuse(where, "an object with begin, content and end", given)
        begin, end = _text_in(given, "begin", where)[num_written:], _text_in(given, "end", where)
        content = self._format(given.get("content"), f"{where}.content", end)
        return self._rule(f"{literal_text(begin)} {content}" if begin else content)

    def _triggered(self, given: Json, where: str, end: str) -> str:
        """Return an expression for free text in which a trigger begins one of the tags that start with it."""
        triggers = _list_in(given, "triggers", where)
        tags = _list_in(given, "tags", where)
        choices, begun = [], set[int]()
        for index, trigger in enumerate(triggers):
            if not isinstance(trigger, str) or not trigger:
                _refuse(f"{where}.triggers[{index}]", "a string that is not empty", trigger)
            rests = []
            for number, tag in enumerate(tags):
                begin = _text_in(tag, "begin", f"{where}.tags[{number}]")
                if begin.startswith(trigger) and number not in begun:
                    begun.add(number)
                    rests.append(self._tag(tag, f"{where}.tags[{number}]", len(trigger)))
            if rests:
                before = self._rule(_ANY_TEXT, f"[suffix={literal_text(trigger)}]")
                choices.append(f"{before} ({' | '.join(rests)})")
        left = next((number for number in range(len(tags)) if number not in begun), None)
        if left is not None:
            _refuse(f"{where}.tags[{left}].begin", "a text that starts with one of the triggers", tags[left]["begin"])
        tag = self._rule(" | ".join(choices))
        least, most = int(bool(given.get("at_least_one"))), 1 if given.get("stop_after_first") else MAX_TAGS
        rest = self._rule(_ANY_TEXT, f"[suffix={literal_text(end)}]") if end else _ANY_TEXT
        if given.get("stop_after_first"):
            return self._rule(f"{tag} | {rest}" if not least else tag)
        return self._rule(f"{tag}{{{least},{most}}} {rest}")


def _text_in(given: object, name: str, where: str) -> str:
    value = given.get(name) if isinstance(given, Mapping) else None
    if not isinstance(value, str):
        _refuse(f"{where}.{name}", "a string", value)
    return value


def _list_in(given: Json, name: str, where: str) -> Sequence[Any]:
    value = given.get(name)
    if not isinstance(value, list) or not value:
        _refuse(f"{where}.{name}".lstrip("."), "a list that is not empty", value)
    return value


def _refuse(where: str, expected: str, got: object) -> NoReturn:
    place = f"structural_tag.{where}".rstrip(".")
    raise InvalidRequestError(f"{place} must be {expected}, got {shown(got)}", param="structural_tag")
