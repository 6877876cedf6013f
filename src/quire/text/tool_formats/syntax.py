"""Patterns of a pair of formats, compiled once from the templates of their rows."""

import re
from collections.abc import Iterable
from functools import lru_cache

from quire.text.tool_formats.reader import SPACE, any_of, atoms, sequence
from quire.text.tool_formats.tool_format import ReasoningFormat, ToolFormat

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
