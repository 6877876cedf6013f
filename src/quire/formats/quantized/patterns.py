"""Regular expressions of untrusted configs: a subset of Python's, matched in bounded time.

`re` backtracks: a pattern of 30 characters can keep it busy for years. Here every node of a pattern maps a set of
positions in the text to the set of positions behind a match, each position once: at most pattern length times text
length steps, and MAX_COUNT times that with `{m,n}`. There are literals, `.`, classes, `\\d`, `\\w`, `\\s`, groups, `|`,
`*`, `+`, `?`, `{m,n}`, `^` and `$`; lazy quantifiers match as greedy ones. All else is refused, and so is a repetition
within a repetition.
"""

from collections.abc import Callable, Sequence
from functools import cache

MAX_PATTERN_CHARACTERS = 512
MAX_GROUP_DEPTH = 16
MAX_COUNT = 9

Positions = frozenset[int]
Node = Callable[[str, Positions], Positions]
Test = Callable[[str], bool]

_SETS: dict[str, Test] = {"d": str.isdigit, "w": lambda c: c.isalnum() or c == "_", "s": str.isspace}
_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_QUANTIFIERS = (*_SIGNS, "{")
_SPECIAL = "\\.[](){}*+?|^$-/'\" _"  # characters that a backslash makes literal


class PatternError(ValueError):
    """A pattern that is malformed, too long, or outside of the subset. The text says which."""


def matches_start(pattern: str, text: str, *, ends: Callable[[int], bool] = lambda _: True) -> bool:
    """Return whether the pattern matches at the start of the text, up to a place that `ends` accepts.

    As `re.match` does. Raises PatternError.
    """
    return any(map(ends, compile_pattern(pattern)(text, frozenset((0,)))))


@cache
def compile_pattern(pattern: str) -> Node:
    """Return the node of a whole pattern. Raises PatternError."""
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise PatternError(f"more than {MAX_PATTERN_CHARACTERS} characters")
    parser = _Parser(pattern)
    node = parser.alternatives(0)
    if parser.rest:
        raise PatternError(f"unexpected {parser.rest[0]!r}")
    return node


class _Parser:
    """Recursive descent over a pattern, `rest` of which is not read yet."""

    def __init__(self, pattern: str) -> None:
        self.rest = pattern
        self._num_loops = 0

    def alternatives(self, depth: int) -> Node:
        """Read sequences with | between them."""
        if depth > MAX_GROUP_DEPTH:
            raise PatternError(f"more than {MAX_GROUP_DEPTH} groups in each other")
        branches = [self._sequence(depth)]
        while self._accept("|"):
            branches.append(self._sequence(depth))
        return lambda text, starts: frozenset().union(*(branch(text, starts) for branch in branches))

    def _sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while self.rest and self.rest[0] not in "|)":
            loops = self._num_loops
            item = self._item(depth)
            items.append(self._quantified(item, has_loop=self._num_loops > loops))
        return _in_sequence(items)

    def _item(self, depth: int) -> Node:
        if self._accept("(?:") or self._accept("("):
            if self.rest.startswith("?"):
                raise PatternError(f"unsupported group ({self.rest[:2]}")
            node = self.alternatives(depth + 1)
            self._require(")")
            return node
        if self._accept("^"):
            return self._anchor(lambda _, starts: starts & {0})
        if self._accept("$"):
            return self._anchor(lambda text, starts: starts & {len(text)})
        return _character(self._test())

    def _anchor(self, node: Node) -> Node:
        if self.rest[:1] in _QUANTIFIERS:
            raise PatternError(f"nothing to repeat before {self.rest[0]!r}")
        return node

    def _test(self) -> Test:
        """Read what one character is tested for."""
        if self._accept("."):
            return lambda _: True
        if self._accept("["):
            return self._character_class()
        if self.rest[0] in _QUANTIFIERS:
            raise PatternError(f"nothing to repeat before {self.rest[0]!r}")
        return self._escaped() if self._accept("\\") else self._take().__eq__

    def _escaped(self) -> Test:
        letter = self._take()
        if letter in _SETS:
            return _SETS[letter]
        if letter not in _SPECIAL:
            raise PatternError(f"unsupported escape \\{letter}")
        return letter.__eq__

    def _character_class(self) -> Test:
        is_negated, tests = self._accept("^"), list[Test]()
        while not self.rest.startswith("]") or not tests:
            first = self._take()
            if first == "\\":
                tests.append(self._escaped())
            elif self.rest.startswith("-") and not self.rest.startswith("-]"):
                self._accept("-")
                tests.append(_between(first, self._take()))
            else:
                tests.append(first.__eq__)
        self._accept("]")
        return lambda c: any(test(c) for test in tests) != is_negated

    def _quantified(self, item: Node, *, has_loop: bool) -> Node:
        """Read the quantifier behind an item, if there is one."""
        least, most = self._counts()
        if most != 1:
            if has_loop:
                raise PatternError("a repetition within a repetition")
            self._num_loops += 1
        if (least, most) == (1, 1):
            return item
        self._accept("?")  # lazy: the same matches
        return _repeated(item, least, most)

    def _counts(self) -> tuple[int, int | None]:
        for sign, counts in _SIGNS.items():
            if self._accept(sign):
                return counts
        if not self._accept("{"):
            return 1, 1
        inner, end, self.rest = self.rest.partition("}")
        least, comma, most = inner.partition(",")
        if not end or not least.isdecimal() or (most and not most.isdecimal()) or max(len(least), len(most)) > 3:
            raise PatternError(f"unsupported quantifier {{{inner[:9]}}}")
        low, high = int(least), int(most) if most else (None if comma else int(least))
        if not low <= (low if high is None else high) <= MAX_COUNT:
            raise PatternError(f"{{{inner}}} is not from 0 to {MAX_COUNT}")
        return low, high

    def _take(self) -> str:
        if not self.rest:
            raise PatternError("it ends too early")
        taken, self.rest = self.rest[0], self.rest[1:]
        return taken

    def _accept(self, token: str) -> bool:
        if not self.rest.startswith(token):
            return False
        self.rest = self.rest[len(token) :]
        return True

    def _require(self, token: str) -> None:
        if not self._accept(token):
            raise PatternError(f"no {token}")


def _character(test: Test) -> Node:
    return lambda text, starts: frozenset(i + 1 for i in starts if i < len(text) and test(text[i]))


def _between(first: str, last: str) -> Test:
    if first > last or last == "\\":
        raise PatternError(f"empty range {first}-{last}")
    return lambda c: first <= c <= last


def _in_sequence(items: Sequence[Node]) -> Node:
    def node(text: str, starts: Positions) -> Positions:
        for item in items:
            starts = item(text, starts)
        return starts

    return node


def _repeated(item: Node, least: int, most: int | None) -> Node:
    """Return the node of `least` to `most` repetitions; None: any number, with each position tried once."""

    def node(text: str, starts: Positions) -> Positions:
        for _ in range(least):
            starts = item(text, starts)
        found = new = starts
        count = least
        while new and (most is None or count < most):
            new = item(text, new) - found
            found, count = found | new, count + 1
        return found

    return node
