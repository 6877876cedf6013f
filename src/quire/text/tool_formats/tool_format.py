"""Rows of the tables of tool formats, the patterns compiled from them, and JSON of values written as text.

A call is written as a template says. Its fields: `{name}`; `{arguments}` in the notation of the row; `{call}`, an
object with name and arguments, `{calls}`, a list of such; `{list}`, a list of calls in Python; `{parameters}`, one
text by the template `parameter` for each, with `{key}`, `{type}` and `{value}`; `{index}`, a number. White space of a
template is written as it is, and may be missing or differ where it is read; `{?text}` and `{:index}` are written, and
may be missing.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from quire.text.tool_formats.reader import SPACE, any_of, atoms, sequence

_HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

TYPE_NAMES: dict[type, str] = {  # as formats and schemas write them
    bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", dict: "object", list: "array"
}  # fmt: skip


@dataclass(frozen=True)
class ToolFormat:
    """The way in which models of a family write tool calls."""

    name: str
    models: str  # for the documentation
    call: str
    parameter: str = ""
    section: tuple[str, str] = ("", "")  # around all calls, and only calls; special tokens, which text never contains
    separator: str = "\n"  # between calls, and between those of a list
    notation: Literal["json", "tagged", "python", "gemma"] = "json"
    variants: tuple[str, ...] = ()  # templates of calls that are read too
    skips_space: bool = False  # white space in front of calls is no content, even if `call` does not begin with it
    drops: tuple[str, ...] = ()  # markers around content that are no part of it
    keys: tuple[str, str] = ("name", "arguments")  # keys of `{call}`; `parameters` and `arguments` are both read
    index_key: str = ""  # key of a number in `{call}`, a text in front of the name
    has_name_as_key: bool = False  # `{call}` is an object with one key, the name; its value are the arguments
    quote: str = '<|"|>'  # around strings in Gemma's notation
    is_escaped: bool = False  # names and keys are escaped as in XML
    has_channels: bool = False  # the output is a sequence of messages with headers, as in Harmony
    aliases: tuple[str, ...] = ()  # names of vLLM's parsers for it
    fingerprints: tuple[tuple[str, ...], ...] = ()  # any of these groups: texts that a chat template has all of

    @property
    def is_bare(self) -> bool:
        """Return whether calls begin without a marker: then they are calls only at the start and of known tools."""
        return self.call.startswith("{")

    @property
    def marker_texts(self) -> tuple[str, ...]:
        """Return the texts that the format consists of: special tokens that are part of one are kept in the text."""
        templates = (self.call, self.parameter, *self.variants, *self.section, *self.drops)
        texts = (text for template in templates for text in re.split(r"\{[^}]*\}", template))
        extra = (*(_HARMONY if self.has_channels else ()), *([self.quote] if self.notation == "gemma" else []))
        return (*dict.fromkeys(text for text in texts if text), *extra)


@dataclass(frozen=True)
class ReasoningFormat:
    """The way in which models of a family mark their reasoning."""

    name: str
    models: str
    markers: tuple[tuple[str, str], ...]  # start and end; the first pair is written, all are read
    ends: tuple[str, ...] = ()  # markers of what follows, which end the reasoning without being part of its end
    is_open_from_start: bool = False  # models that reason without a start marker, in the prompt or the output
    drops: tuple[str, ...] = ()  # markers around the content that follows
    may_call: bool = True  # calls inside of reasoning are calls; False: text
    has_channels: bool = False
    aliases: tuple[str, ...] = ()
    fingerprints: tuple[tuple[str, ...], ...] = ()

    @property
    def marker_texts(self) -> tuple[str, ...]:
        """Return the texts that the format consists of: special tokens that are part of one are kept in the text."""
        pairs = (text for pair in self.markers for text in pair)
        return (*pairs, *self.ends, *self.drops, *(_HARMONY if self.has_channels else ()))

    def starts(self, prompt: str) -> bool:
        """Return whether the output starts inside of reasoning: by the end of the rendered prompt alone."""
        prompt = prompt[-256:].rstrip()
        if prompt.endswith(tuple(start.rstrip() for start, _ in self.markers)):
            return not self.has_channels
        return self.is_open_from_start and not prompt.endswith(tuple(end.rstrip() for _, end in self.markers))


NAME = r"[^\s<>\"'(){}\[\]|=,;:]{1,128}+"
KEY = r"[^<>\"{}\n]{1,256}+"  # name of a tagged parameter
PYTHON_KEY = r"[^\W\d]\w{0,127}+"
GEMMA_KEY = r"[^:{}\[\],<\s][^:{}\[\],<]{0,255}+"
_BODIES = ("arguments", "parameters")


def split(template: str) -> list[str]:
    """Return the texts of a template at even places, and between them the names of its fields."""
    return re.split(r"\{([^}]*)\}", template)


def marker_of(text: str) -> str:
    """Return the marker that a text begins with: all up to the first white space inside of it."""
    return re.match(r"\s*\S*", text)[0]  # type: ignore[index]


def _literals(name: str, texts: Iterable[str]) -> list[str]:
    """Return sequences that find each of the texts, as `name__N`."""
    return [sequence(f"{name}__{number}", atoms(text)) for number, text in enumerate(texts)]


class ParameterSyntax:
    """Patterns of one parameter of a tagged call."""

    def __init__(self, row: ToolFormat, close: str, nexts: Iterable[str]) -> None:
        pieces = split(row.parameter)
        opening = [SPACE, *atoms(pieces[0])]
        head = list(opening)
        for field, text in zip(pieces[1:-2:2], pieces[2:-1:2], strict=True):
            head += [f"(?P<_{field}>{KEY})", *atoms(text.removesuffix("\n"))]
        line = [r"\n?+"] if pieces[-3].endswith("\n") else []
        closing = [*line, *atoms(pieces[-1].strip())]
        ends = [[SPACE, *atoms(text)] for text in (marker_of(pieces[0]), close)]
        self.head = any_of(
            sequence("parameter", [*head, *line], [[r"[\s\S]"]]) if line else sequence("parameter", head),
            sequence("close", [SPACE, *atoms(close)]),
        )
        values = [sequence("end", closing, ends)]
        if line:  # at the start of a line, the next parameter ends a value that was not closed
            values.append(sequence("next", [], [[r"\n", *atoms(marker_of(pieces[0]))]]))
        values.append(sequence("unclosed", line, [[*atoms(close), SPACE, *atoms(text)] for text in nexts if text]))
        self.value_end = any_of(*values)
        self.value_end_at_end = re.compile(rf"{''.join([*line, *atoms(close)])}\s*\Z")


class Syntax:
    """Patterns that the parser looks for; the groups of a match say what was found."""

    def __init__(self, row: ToolFormat | None, reasoning: ReasoningFormat | None) -> None:
        calls: list[str] = []
        if row is not None:
            calls = self._add_calls(row)
        drops = _literals("drop", (*(row.drops if row else ()), *(reasoning.drops if reasoning else ())))
        pairs, others = (reasoning.markers, reasoning.ends) if reasoning else ((), ())
        starts = _literals("reasoning", ("\n" + start for start, _ in pairs))
        ends = _literals("end", ("\n" + end for _, end in pairs))
        ends += [sequence("other", [SPACE], [atoms(text) for text in others])] if others else []
        self.start = any_of(*starts)
        self.content = any_of(*calls, *drops, *starts)
        self.reasoning = any_of(*ends, *(calls if reasoning and reasoning.may_call else ()))
        self.space = any_of(sequence("text", [SPACE], [[r"\S"]]))

    def _add_calls(self, row: ToolFormat) -> list[str]:
        """Compile the patterns of calls; return the sequences that begin calls, and sections of calls."""
        templates = [split(template) for template in (row.call, *row.variants)]
        self.markers = list(dict.fromkeys(marker_of(pieces[0]) for pieces in templates))
        self.markers.sort(key=lambda marker: not marker)  # the empty one last
        tail = templates[0][-1]
        close = marker_of(tail).strip()
        tails = {pieces[-1].strip() for pieces in templates}
        if row.notation == "tagged":
            rest = tail.strip().removeprefix(close).strip()
            tails = {rest}
            self.parameter = ParameterSyntax(row, close, [rest, *self.markers, row.section[1]])
        self.heads = [self._heads(row, marker, templates, close) for marker in self.markers]
        self.bare = len(self.markers) - 1
        self.separator = any_of(sequence("separator", [SPACE, *atoms(row.separator.strip())], [[SPACE, r"[\[{]"]]))
        space = "\n" if row.skips_space else ""
        begins = _literals("call", (space + marker for marker in self.markers if marker))
        ahead = [[SPACE, *atoms(text)] for text in (*self.markers, row.section[1]) if text]
        ends = _literals("tail", ("\n" + text for text in sorted(tails) if text))
        self.tail = any_of(*ends)
        if row.notation == "tagged":
            ends = _literals("tail", ["\n" + (rest or close)])
        self.after_broken = any_of(*ends, *([sequence("other", [], ahead)] if ahead else []))
        if not row.section[0]:
            return begins
        self.section = any_of(*begins, *_literals("section_end", [row.section[1]]))
        return [*_literals("section", [row.section[0]]), *begins]

    def _heads(self, row: ToolFormat, marker: str, templates: list[list[str]], close: str) -> re.Pattern[str]:
        """Return the pattern of what follows a marker: a name as `head__N` for template N, or the start of JSON."""
        heads = []
        for number, (before, *rest) in enumerate(templates):
            if marker_of(before) != marker:
                continue
            parts = [*atoms(before.removeprefix(marker))]
            if rest[0] in ("call", "calls", "list"):
                kind = "list" if rest[0] == "list" else "json"
                first = r"\[" if rest[0] == "list" else r"[\[{]"
                while parts and parts[-1] == SPACE:
                    parts.pop()
                heads.append(sequence(f"{kind}__{number}", [SPACE, *parts, *([SPACE] if parts else [])], [[first]]))
                continue
            body = ""
            for field, text in zip(rest[::2], rest[1::2], strict=True):
                if field in _BODIES:
                    body = field
                    break
                parts += _field(field, number) + list(atoms(text))
            while parts[-1] == SPACE:
                parts.pop()
            aheads: list[list[str]] = [[SPACE, r"\{"]] if body == "arguments" else []
            if body == "parameters":
                aheads = [[SPACE, *atoms(text)] for text in (marker_of(split(row.parameter)[0]), close)]
            heads.append(sequence(f"head__{number}", parts, aheads))
        return any_of(*heads)


def _field(field: str, number: int) -> list[str]:
    """Return the atoms of a field of a call's head."""
    if field == "name":
        return [SPACE, f"(?P<_name{number}>{NAME})", SPACE]
    if field == "index":
        return [r"\w{1,64}+"]
    if field == ":index":
        return [r"(?::\d{0,9}+)?+", SPACE]
    assert field.startswith("?"), field
    return [f"(?:{re.escape(field[1:])})?"]


@lru_cache(64)
def syntax(row: ToolFormat | None, reasoning: ReasoningFormat | None) -> Syntax:
    """Return the patterns of a pair of formats."""
    return Syntax(row, reasoning)


_LITERALS = {"True": ("true", "boolean"), "False": ("false", "boolean"), "None": ("null", "null")}
_SPACE = r"[\s\x1c-\x1f]*"  # what str.strip removes
_WRITTEN = {  # regexes of the texts of values, by their types; longer than need be where JSON is no regular language
    "integer": r"-?[0-9]+",
    "number": r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
    "boolean": "true|false|True|False",
    "null": "null|None",
    "object": r"\{(?s:.*)\}",
    "array": r"\[(?s:.*)\]",
}


def string_text(text: str) -> str:
    """Return the inside of the JSON string of a text."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_value(text: str, types: frozenset[str] | None) -> str:
    """Return the JSON of a value that was written as text: of one of the types, of any if there are none.

    What is no JSON of these types is a string.
    """
    value = text.strip()
    literal, type_name = _LITERALS.get(value, (value, ""))
    if not type_name:
        try:  # (integers are not converted: that takes time quadratic in their digits)
            type_name = TYPE_NAMES[type(json.loads(value, parse_constant=_refuse, parse_int=_no_digits))]
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)
    return literal if reads_json(type_name, types) else json.dumps(text, ensure_ascii=False)


def reads_json(type_name: str, types: frozenset[str] | None) -> bool:
    """Return whether `json_value` reads the JSON of a value of a type as that value, and not as a string."""
    if type_name == "string":  # the model wrote the quotes of a value that is no text
        return bool(types and "string" not in types)
    return not types or type_name in types or (type_name == "integer" and "number" in types)


def misread_texts(types: frozenset[str]) -> Sequence[str]:
    """Return regexes of all texts that `json_value` would not read as strings, for these types; and of some others."""
    if types == {"string"}:
        return ()
    written = [_WRITTEN[name] for name in _WRITTEN if not types or name in types]
    if types and "string" not in types:
        written.append('"(?s:.*)"')
    return [f"{_SPACE}(?:{'|'.join(written)}){_SPACE}"]


def _no_digits(_: str) -> int:
    return 0


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
