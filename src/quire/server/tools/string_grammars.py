"""Grammars of strings that are written without quotes of JSON, by the keywords of their schemas."""

import re
from collections.abc import Iterator, Sequence

from quire.core.checks import shown
from quire.grammar_writing.scalars import FORMATS
from quire.grammar_writing.schemas import refuse
from quire.grammar_writing.shapes import Shape
from quire.grammar_writing.texts import literal_text, regex_text
from quire.server.tools.grammar_rules import Rules


def enumerated_texts(shape: Shape) -> list[str] | None:
    """Return the strings of an enumeration that have an allowed length; None without one, if some length is allowed."""
    values, (least, most) = shape.enumerated(), shape.limits("minLength", "maxLength")
    if values is None:
        return [] if most is not None and least > most else None
    return [value for value in values if least <= len(value) and (most is None or len(value) <= most)]


def text_body(rules: Rules, shape: Shape, texts: Sequence[str] | None, misread: Sequence[str] = ()) -> str:
    """Return the name of a terminal of the strings that a shape allows; empty: any text.

    `texts`: enumerated ones. `misread`: regexes of texts that are left out.
    """
    bodies = list(_regexes(shape))
    if texts is not None:
        words = rules.add(" | ".join(literal_text(text) if text else "//" for text in texts), is_terminal=True)
        bodies.insert(0, words)
    else:
        least, most = shape.limits("minLength", "maxLength")
        if least or most is not None:
            bodies.append(f"/(?s:.){{{least},{'' if most is None else most}}}/")
    bodies += [f"~/{text}/" for text in misread]
    if bodies and bodies[0].startswith("~"):
        bodies.insert(0, "/(?s:.*)/")
    return rules.add(" & ".join(bodies), is_terminal=True) if bodies else ""


def has_regexes(shape: Shape) -> bool:
    """Return whether a shape of strings has a pattern or a format."""
    return bool(shape.keywords() & {"pattern", "format"})


def _regexes(shape: Shape) -> Iterator[str]:
    """Yield expressions that a string fits if it fits the patterns and formats of a shape."""
    for pattern, place in shape.given("pattern"):
        if not isinstance(pattern, str):
            refuse(place, f"pattern must be a string, got {shown(pattern)}")
        yield searched(pattern)
    for name, place in shape.given("format"):
        if name not in FORMATS:
            refuse(place, f"format must be a string, got {shown(name)}")
        yield regex_text(FORMATS[name])


def searched(pattern: str) -> str:
    """Return a regular expression of the texts in which a pattern is found; its anchors are those of the text."""
    return regex_text("|".join(map(_anchored, _alternatives(pattern))), is_of_schema=True)


def _anchored(pattern: str) -> str:
    """Return a regex of whole texts for one that is searched for, without alternatives outside of groups."""
    before = after = "(?s:.*)"
    if pattern.startswith("^"):
        before, pattern = "", pattern[1:]
    if (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2 and pattern.endswith("$"):
        after, pattern = "", pattern[:-1]
    return f"{before}(?:{pattern}){after}"


def _alternatives(pattern: str) -> list[str]:
    """Return the alternatives of a pattern: what `|` outside of groups separates."""
    depth = start = 0
    found = []
    for piece in re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]", pattern, re.DOTALL):
        depth += (piece[0] == "(") - (piece[0] == ")")
        if piece[0] == "|" and depth == 0:
            found.append(pattern[start : piece.start()])
            start = piece.end()
    return [*found, pattern[start:]]
