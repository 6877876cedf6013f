"""Structural tags: free text in which what follows certain markers has a form. Their JSON becomes a grammar.

Two forms of JSON are known: OpenAI's and vLLM's `{"type": "structural_tag", "format": {...}}`, with formats that
contain each other, and the older one with `structures` and `triggers`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NoReturn

from quire.core.checks import shown
from quire.core.errors import InvalidRequestError
from quire.core.structured_outputs import GRAMMAR_LIMITS, has_text
from quire.grammar_writing.schemas import SchemaError
from quire.grammar_writing.texts import json_text, literal_text, regex_text

MAX_TAGS = 128              # tags of one output
MAX_FORMATS = 1024          # formats in one structural tag
_ANY_TEXT = "/(?s:.*)/"
_FIRST_OF_JSON = {  # first characters of values, by their types
    "object": r"\{", "array": r"\[", "string": '"', "boolean": "[tf]", "null": "n", "number": "[-0-9]",
    "integer": "[-0-9]",
}  # fmt: skip
_IN_NUMBERS = "[-+.eE0-9]"
_OPTIONS: Mapping[str, tuple[str, ...]] = {  # options that each type of format takes
    "const_string": ("value",),
    "json_schema": ("json_schema", "style"),
    "any_text": ("excludes", "max_chars"),
    "regex": ("pattern",),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
}

Json = Mapping[str, Any]


def structural_tag_grammar(given: object, whitespace: str | None) -> str:
    """Return the grammar of a structural tag. InvalidRequestError names the place of what is not known or cannot end.

    `whitespace`: regex of what may stand between two lexemes of JSON; None: nothing.
    """
    if not isinstance(given, Mapping):
        _refuse("", "an object", given)
    is_old = "structures" in given
    _check_options(given, ("type", "structures", "triggers") if is_old else ("type", "format"), "")
    if given.get("type", "structural_tag") != "structural_tag":
        _refuse("type", "structural_tag", given["type"])
    return _Formats(whitespace).text(_from_structures(given) if is_old else given.get("format"))


def _from_structures(given: Json) -> Json:
    """Return the format that the older form means."""
    structures = _list_in(given, "structures", "")
    for index, each in enumerate(structures):
        if isinstance(each, Mapping):
            _check_options(each, ("begin", "schema", "end"), f"structures[{index}]")
    tags = [
        {
            "begin": _text_in(each, "begin", where := f"structures[{index}]"),
            "content": {"type": "json_schema", "json_schema": each.get("schema", True)},
            "end": _text_in(each, "end", where),
        }
        for index, each in enumerate(structures)
    ]
    return {"type": "triggered_tags", "triggers": given.get("triggers"), "tags": tags}


@dataclass(frozen=True)
class _Text:
    """Text of a regular language: an expression of terminals. `constant`: the text itself, if there is one alone."""

    terminal: str
    where: str
    constant: str | None = None


@dataclass(frozen=True)
class _Rule:
    """Text of another language. `first`: regex of its first character; `is_number`: it may end with a number."""

    expression: str
    where: str
    first: str = "(?s:.)"
    is_number: bool = False


@dataclass(frozen=True)
class _Triggered:
    """Free text with tags: expressions of a tag with the text in front of it, and terminal of the text behind all."""

    tag: str
    rest: str
    where: str
    least: int
    stops_after_first: bool


@dataclass(frozen=True)
class _OneOf:
    """One of several lists of pieces."""

    choices: Sequence["list[_Piece]"]
    where: str


_Piece = _Text | _Rule | _Triggered | _OneOf


class _Formats:
    """Rules of the formats of one structural tag.

    A format is a list of pieces. Text is matched by terminals, which take all that they can: adjacent texts become one
    terminal, and one in front of another piece ends where its last constant is first found.
    """

    def __init__(self, whitespace: str | None) -> None:
        self._whitespace = whitespace
        self._rules: list[str] = []
        self._num_formats = 0

    def text(self, given: object) -> str:
        """Return the whole grammar of a format."""
        start = self._joined(self._format(given, "format"), is_last=True)
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def _rule(self, expression: str, attribute: str = "", *, is_terminal: bool = False) -> str:
        name = f"{'R' if is_terminal else 'r'}{len(self._rules)}"
        self._rules.append(f"{name}{attribute}: {expression}")
        return name

    # --- formats as pieces --------------------------------------------------------------------------------------------

    def _format(self, given: object, where: str) -> list[_Piece]:
        """Return the pieces of a format."""
        self._num_formats += 1
        if self._num_formats > MAX_FORMATS:
            message = f"structural_tag must have at most {MAX_FORMATS} formats"
            raise InvalidRequestError(message, param="structural_tag")
        if not isinstance(given, Mapping):
            _refuse(where, "an object with a type", given)
        kind = given.get("type")
        if not isinstance(kind, str) or kind not in _OPTIONS:
            _refuse(f"{where}.type", f"one of {', '.join(_OPTIONS)}", kind)
        _check_options(given, ("type", *_OPTIONS[kind]), where)
        if kind == "sequence":
            return [piece for pieces in self._elements(given, where) for piece in pieces]
        if kind == "tag":
            return self._tag(given, where)
        return [self._piece(kind, given, where)]

    def _piece(self, kind: str, given: Json, where: str) -> _Piece:
        match kind:
            case "const_string":
                piece: _Piece = _constant(_text_in(given, "value", where), where)
            case "json_schema":
                piece = self._json(given, where)
            case "regex":
                piece = _Text(regex_text(_text_in(given, "pattern", where)), where)
            case "any_text":
                piece = _Text(self._free_text(given, where), where)
            case "triggered_tags":
                piece = self._triggered(given, where)
            case "tags_with_separator":
                piece = self._separated(given, where)
            case _:
                piece = self._one_of(self._elements(given, where), where)
        return piece

    def _json(self, given: Json, where: str) -> _Piece:
        if given.get("style") not in (None, "json"):
            _refuse(f"{where}.style", "json, the only supported style", given["style"])
        schema = given.get("json_schema", True)
        try:
            rule = self._rule(json_text(schema, self._whitespace))
        except SchemaError as error:
            message = f"structural_tag.{where}.json_schema cannot be a grammar {error}"
            raise InvalidRequestError(message, param="structural_tag") from error
        kinds = schema.get("type") if isinstance(schema, Mapping) else None
        named = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
        known = [kind for kind in named if kind in _FIRST_OF_JSON] or list(_FIRST_OF_JSON)
        first = "|".join(_FIRST_OF_JSON[kind] for kind in known)
        return _Rule(rule, where, first, bool({"number", "integer"} & {*known}))

    def _free_text(self, given: Json, where: str) -> str:
        """Return a terminal of text without `excludes`, of at most `max_chars` characters."""
        most = given.get("max_chars")
        if most is not None and (type(most) is not int or most < 0):
            _refuse(f"{where}.max_chars", "a number of characters", most)
        excludes = _list_in(given, "excludes", where) if given.get("excludes") else []
        for index, text in enumerate(excludes):
            if not isinstance(text, str) or not text:
                _refuse(f"{where}.excludes[{index}]", "a string that is not empty", text)
        return self._without(_ANY_TEXT if most is None else f"/(?s:.){{0,{most}}}/", excludes)

    def _without(self, terminal: str, texts: Sequence[str]) -> str:
        if not texts:
            return terminal
        found = "|".join(re.escape(text).replace("/", "\\/").replace("\n", "\\n") for text in texts)
        return self._rule(f"{terminal} & ~/(?s:.*)(?:{found})(?s:.*)/", is_terminal=True)

    def _elements(self, given: Json, where: str) -> list[list[_Piece]]:
        elements = _list_in(given, "elements", where)
        return [self._format(each, f"{where}.elements[{index}]") for index, each in enumerate(elements)]

    def _one_of(self, choices: Sequence[list[_Piece]], where: str) -> _Piece:
        if all(isinstance(piece, _Text) for pieces in choices for piece in pieces):
            texts = [self._terminal([piece for piece in pieces if isinstance(piece, _Text)]) for pieces in choices]
            return _Text(texts[0] if len(texts) == 1 else self._rule(" | ".join(texts), is_terminal=True), where)
        return _OneOf(choices, where)

    def _tag(self, given: object, where: str, num_written: int = 0) -> list[_Piece]:
        """Return the pieces of a tag, but for the first characters of its beginning."""
        if not isinstance(given, Mapping):
            _refuse(where, "an object with begin, content and end", given)
        _check_options(given, ("type", *_OPTIONS["tag"]), where)
        begin, end = _text_in(given, "begin", where)[num_written:], _text_in(given, "end", where)
        content = self._format(given.get("content"), f"{where}.content")
        pieces = [_constant(begin, where), *content, _constant(end, where)]
        return [piece for piece in pieces if not isinstance(piece, _Text) or piece.constant != ""]

    def _tags(self, given: Json, where: str) -> list[list[_Piece]]:
        tags = _list_in(given, "tags", where)
        return [self._tag(each, f"{where}.tags[{index}]") for index, each in enumerate(tags)]

    def _separated(self, given: Json, where: str) -> _Piece:
        pieces = self._tags(given, where)
        is_number = any(map(_ends_in_number, pieces))
        tags = self._rule(" | ".join(self._joined(each) or '""' for each in pieces))
        between = _text_in(given, "separator", where)
        self._check_number(_Rule(tags, where, is_number=is_number), _constant(between, f"{where}.separator"))
        separator = literal_text(between)
        is_one = _flag(given, "stop_after_first", where)
        several = tags if is_one else f"{tags} ({separator} {tags}){{0,{MAX_TAGS - 1}}}"
        rule = self._rule(several if _flag(given, "at_least_one", where) else f"({several})?")
        return _Rule(rule, where, is_number=is_number)

    def _triggered(self, given: Json, where: str) -> _Piece:
        """Return free text in which a trigger begins one of the tags that start with it."""
        triggers = _list_in(given, "triggers", where)
        tags = _list_in(given, "tags", where)
        text = self._free_text(given, where)
        choices, begun = [], set[int]()
        for index, trigger in enumerate(triggers):
            if not isinstance(trigger, str) or not trigger:
                _refuse(f"{where}.triggers[{index}]", "a string that is not empty", trigger)
            rests = []
            for number, tag in enumerate(tags):
                begin = _text_in(tag, "begin", f"{where}.tags[{number}]")
                if begin.startswith(trigger) and number not in begun:
                    begun.add(number)
                    pieces = self._tag(tag, f"{where}.tags[{number}]", len(trigger))
                    if _ends_in_number(pieces):
                        _refuse_text(f"{where}.tags[{number}].end", "must not be empty behind a number")
                    rests.append(self._joined(pieces) or '""')
            if rests:
                before = self._rule(text, f"[suffix={literal_text(trigger)}]")
                choices.append(f"{before} ({' | '.join(rests)})")
        left = next((number for number in range(len(tags)) if number not in begun), None)
        if left is not None:
            _refuse(f"{where}.tags[{left}].begin", "a text that starts with one of the triggers", tags[left]["begin"])
        rest = self._without(text, [trigger for trigger in triggers if trigger])  # also behind MAX_TAGS tags
        is_least, stops = _flag(given, "at_least_one", where), _flag(given, "stop_after_first", where)
        return _Triggered(self._rule(" | ".join(choices)), rest, where, int(is_least), stops)

    # --- pieces as expressions ----------------------------------------------------------------------------------------

    def _joined(self, pieces: Sequence[_Piece], following: _Piece | None = None, *, is_last: bool = False) -> str:
        """Return an expression for pieces, one behind the other, in front of another. `is_last`: nothing follows."""
        found: list[str] = []
        index = 0
        while index < len(pieces):
            piece = pieces[index]
            start = index + (not isinstance(piece, _Text))
            texts = [each for each in takewhile(_is_text, pieces[start:]) if isinstance(each, _Text)]
            index = start + len(texts)
            behind = pieces[index] if index < len(pieces) else following
            ends = behind is None and is_last
            match piece:
                case _Rule():
                    index = start
                    self._check_number(piece, pieces[start] if start < len(pieces) else following)
                    found.append(piece.expression)
                case _Triggered():
                    found.append(self._with_tags(piece, texts, behind, ends=ends))
                case _OneOf():
                    options = [self._joined([*choice, *texts], behind, is_last=ends) for choice in piece.choices]
                    found.append(self._rule(" | ".join(option or '""' for option in options)))
                case _Text():
                    found.append(self._ended(texts, behind, ends=ends))
        return " ".join(part for part in found if part)

    def _with_tags(self, piece: _Triggered, texts: Sequence[_Text], following: _Piece | None, *, ends: bool) -> str:
        """Return an expression for free text with tags, and the texts behind it."""
        rest = self._ended([_Text(piece.rest, piece.where), *texts], following, ends=ends)
        if not piece.stops_after_first:
            return f"{piece.tag}{{{piece.least},{MAX_TAGS}}} {rest}"
        behind = self._ended(texts, following, ends=ends) if texts else ""
        return f"{piece.tag} {behind}" if piece.least else self._rule(f"{piece.tag} {behind} | {rest}")

    def _ended(self, texts: Sequence[_Text], following: _Piece | None, *, ends: bool) -> str:
        """Return an expression for adjacent texts in front of a piece; `ends`: nothing follows."""
        if all(text.constant is not None for text in texts):
            return literal_text("".join(text.constant or "" for text in texts))
        if ends:
            return self._rule(self._terminal(texts))
        last = list(takewhile(lambda text: text.constant is not None, reversed(texts)))
        end = "".join(text.constant or "" for text in reversed(last))
        front = self._terminal(texts[: len(texts) - len(last)])
        if end:
            return self._rule(front, f"[suffix={literal_text(end)}]")
        if self._may_continue(front, following.first if isinstance(following, _Rule) else "(?s:.)"):
            problem = "must end with a constant text, or nothing may follow it: its end could not be found"
            _refuse_text(texts[-1].where, problem)
        return self._rule(front)

    def _terminal(self, texts: Sequence[_Text]) -> str:
        if len(texts) == 1:
            return texts[0].terminal
        return self._rule(" ".join(text.terminal for text in texts), is_terminal=True)

    def _may_continue(self, terminal: str, first: str) -> bool:
        """Return whether a text of a terminal may go on with the first character of what follows, and be one of it."""
        longer = f"R_ALL & R_LONGER\nR_ALL: {terminal}\nR_LONGER: {terminal} /(?:{first})(?s:.*)/"
        return self._has_text(longer)

    def _check_number(self, piece: _Rule, following: _Piece | None) -> None:
        """Refuse text behind JSON that may be a number and would go on with it."""
        if not piece.is_number or following is None:
            return
        behind = following.terminal if isinstance(following, _Text) else _ANY_TEXT
        if self._has_text(f"R_TEXT & /{_IN_NUMBERS}(?s:.*)/\nR_TEXT: {behind}"):
            _refuse_text(following.where, "must not go on with a number in front of it: its end could not be found")

    def _has_text(self, terminals: str) -> bool:
        """Return whether a terminal matches any text."""
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer  # noqa: PLC0415 (a compiled library)

        own = "\n".join(rule for rule in self._rules if rule.startswith("R"))
        grammar = f"start: R_START\nR_START: {terminals}\n{own}\n"
        matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=LLParserLimits(**GRAMMAR_LIMITS))
        return has_text(matcher)


def _is_text(piece: _Piece) -> bool:
    return isinstance(piece, _Text)


def _ends_in_number(pieces: Sequence[_Piece]) -> bool:
    """Return whether the last piece may end with a number, which digits behind it would continue."""
    match pieces[-1] if pieces else None:
        case _Rule(is_number=is_number):
            return is_number
        case _OneOf(choices=choices):
            return any(map(_ends_in_number, choices))
    return False


def _constant(text: str, where: str) -> _Text:
    return _Text(literal_text(text), where, text)


def _check_options(given: Json, known: Sequence[str], where: str) -> None:
    """Refuse an option that is not known, unless it is null."""
    for name, value in given.items():
        if name not in known and value is not None:
            place = f"structural_tag.{where}.{str(name)[:80]}".replace("..", ".")
            message = f"{place} is not supported: it would constrain the output, or nothing"
            raise InvalidRequestError(message, param="structural_tag")


def _flag(given: Json, name: str, where: str) -> bool:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        _refuse(f"{where}.{name}", "true or false", value)
    return bool(value)


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
    _refuse_text(where, f"must be {expected}, got {shown(got)}")


def _refuse_text(where: str, problem: str) -> NoReturn:
    place = f"structural_tag.{where}".rstrip(".")
    raise InvalidRequestError(f"{place} {problem}", param="structural_tag")
