"""Rules of a grammar in llguidance's Lark, and the strings in them that are written without quotes of JSON."""

import re
from collections.abc import Iterator, Mapping, Sequence

from quire.core.checks import shown
from quire.grammar_writing.scalars import FORMATS
from quire.grammar_writing.schema_shapes import Shape
from quire.grammar_writing.schemas import refuse
from quire.grammar_writing.texts import literal_text, marker_text, regex_text

ANY_TEXT = "/(?s:.*)/"
MAX_GRAMMAR_BYTES = 1 << 20  # grammar of one request's calls: compiled, a character takes up to 256 bytes
MAX_WRITTEN_BYTES = 8 << 20  # the same, with expressions that are written several times and stored once


class GrammarSizeError(ValueError):
    """The tools of a request need a grammar past MAX_GRAMMAR_BYTES."""


class GrammarRules:
    """Collects rules. Texts that are special tokens become ids: as text, they would match other tokens."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special  # ids of special tokens, by their texts
        self._pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        self._rules: dict[str, str] = {}  # name with attributes -> expression
        self._names: dict[str, str] = {}  # expression -> name of its rule
        self._num_bytes = self._num_written = 0

    def add(self, expression: str, attribute: str = "", *, is_terminal: bool = False) -> str:
        """Return the name of a rule for an expression; the same one for the same expression.

        Only terminals, and rules with an attribute, may be intersections.
        """
        key = f"{'R' if is_terminal else 'r'}{attribute}: {expression}"
        self._count(0 if key in self._names else len(expression), len(expression))
        if key not in self._names:
            self._names[key] = f"{key[0]}{len(self._names)}"
            self._rules[self._names[key] + attribute] = expression
        return self._names[key]

    def reserve(self) -> str:
        """Return the name of a rule that `define` gives its expression: recursive rules need one before."""
        name = f"r{len(self._names)}"
        self._names[f"reserved {name}"] = name
        return name

    def define(self, name: str, expression: str) -> None:
        """Define a reserved rule."""
        self._rules[name] = expression
        self._count(len(expression), len(expression))

    def _count(self, num_stored: int, num_written: int) -> None:
        self._num_bytes += num_stored
        self._num_written += num_written
        if self._num_bytes > MAX_GRAMMAR_BYTES or self._num_written > MAX_WRITTEN_BYTES:
            raise GrammarSizeError(f"their schemas need a grammar of more than {MAX_GRAMMAR_BYTES} bytes")

    def is_special(self, text: str) -> bool:
        """Return whether a text is a special token."""
        return text in self._special

    def free_text(self, specials: Sequence[str]) -> str:
        """Return an expression for texts with some special tokens between them, up to the last of these."""
        if not specials:
            return ""
        tokens = alternatives([self.literal(text) for text in specials])
        return self.add(f"({ANY_TEXT} {tokens})*")

    def literal(self, text: str) -> str:
        """Return an expression for a text."""
        return marker_text(text, self._special)

    def one_of(self, texts: Sequence[str]) -> str:
        """Return an expression for one of some texts; a terminal where that is possible: it costs least."""
        expressions = [self.literal(text) or '""' for text in texts]
        if len(texts) == 1 or "" in texts or any(self._pattern.search(text) for text in texts):
            return alternatives(expressions)
        return self.add(" | ".join(expressions), is_terminal=True)

    def text_before(self, end: str, without: Sequence[str] = (), body: str = "") -> str:
        """Return an expression for a text up to and including `end`, and without some texts.

        `body`: terminal of the text; empty: any text.
        """
        if found := self._pattern.search(end):  # ends the text: its last characters are the end's first ones
            last = escaped(end[: found.start()])
            text = self.add(f"{body} /{last}/", is_terminal=True) if body and last else body or f"/(?s:.*){last}/"
            return f"{text} {self.literal(end[found.start() :])}"
        terminal = " & ".join([body or ANY_TEXT, *(f"~/(?s:.*){escaped(text)}(?s:.*)/" for text in without)])
        return self.add(terminal, f"[suffix={literal_text(end)}]")

    def text_without(self, texts: Sequence[str]) -> str:
        """Return an expression for text without some texts, of which special tokens are none anyway."""
        found = [f"~/(?s:.*){escaped(text)}(?s:.*)/" for text in texts if not self._pattern.search(text)]
        return self.add(" & ".join([ANY_TEXT, *found]), is_terminal=True)

    def text(self, start: str) -> str:
        """Return the grammar that starts with an expression."""
        rules = [f"start: {start}", *(f"{name}: {expression}" for name, expression in self._rules.items())]
        return "\n".join(rules) + "\n"


def escaped(text: str) -> str:
    """Return a text as a part of a regular expression."""
    return re.escape(text).replace("/", r"\/").replace("\n", r"\n")


def alternatives(expressions: Sequence[str]) -> str:
    """Return one expression for any of some."""
    return expressions[0] if len(expressions) == 1 else f"({' | '.join(expressions)})"


def enumerated_texts(shape: Shape) -> list[str] | None:
    """Return the strings of an enumeration that have an allowed length; None without one, if some length is allowed."""
    values, (least, most) = shape.enumerated(), shape.limits("minLength", "maxLength")
    if values is None:
        return [] if most is not None and least > most else None
    return [value for value in values if least <= len(value) and (most is None or len(value) <= most)]


def text_body(rules: GrammarRules, shape: Shape, texts: Sequence[str] | None, misread: Sequence[str] = ()) -> str:
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
