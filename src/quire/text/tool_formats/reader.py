"""Incremental reading of text: patterns that match their own beginnings, and the buffer that they are matched against.

A pattern is a sequence of atoms (characters, runs of white space, names). Its expression also matches every beginning
of it that stands at the end of the buffer, so that exactly the text is held back that may still become what is looked
for. Every run is bounded and possessive: held text is short, and reading takes linear time.
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # suspended while all text is consumed or held back

SPACE = r"\s{0,32}+"
_STRING = re.compile(r'[^"\\]*+(?:\\[\s\S][^"\\]*+)*+')
_JSON_STRING = re.compile(r'[^"\\\x00-\x1f]*+(?:\\[^\x00-\x1f][^"\\\x00-\x1f]*+)*+')
_SPACE = re.compile(r"\s*+")
_OUTSIDE = re.compile(r"[\s\w+\-.,:]*+")


def atoms(literal: str) -> tuple[str, ...]:
    """Return the atoms of a literal text; a run of white space in it, and a place between tags, stands for any run."""
    pieces = re.findall(r"\s+|(?<=>)(?=<)|\S", literal)
    return tuple(re.escape(piece) if piece.strip() else SPACE for piece in pieces)


def sequence(name: str, parts: Sequence[str], aheads: Sequence[Sequence[str]] = ()) -> str:
    """Return an expression of the parts, if one of `aheads` follows; it also matches beginnings at the buffer's end.

    The last group of a full match is `name`, or `name__N` for the Nth of `aheads`; what is consumed ends at the group
    `_after_name`, or at the end. Groups of the parts begin with `_`.
    """
    expression = f"(?P<{name}>)"
    if aheads:
        ends = [_chain(ahead, f"(?P<{name}__{number}>)") for number, ahead in enumerate(aheads)]
        expression = f"(?P<_after_{name}>)(?:{'|'.join(ends)})"
    return _chain(parts, expression)


def _chain(parts: Sequence[str], expression: str) -> str:
    for atom in reversed(parts):
        expression = f"{atom}(?:{expression}|\\Z)"
    return expression


def any_of(*expressions: str) -> re.Pattern[str]:
    """Return a pattern of alternatives made by `sequence`."""
    return re.compile("|".join(expressions) or r"(?!)")


def kind_of(found: re.Match[str]) -> str:
    """Return the name of the sequence that was matched, without what follows `__`; "" if a beginning of one was."""
    group = found.lastgroup
    return "" if group is None or group[0] == "_" else group.partition("__")[0]


def number_of(found: re.Match[str]) -> int:
    """Return the number behind `__` in the name of the sequence that was matched."""
    assert found.lastgroup is not None
    return int(found.lastgroup.split("__")[1])


def _stop(found: re.Match[str]) -> int:
    """Return the end of what a full match consumes."""
    assert found.lastgroup is not None
    boundary = f"_after_{found.lastgroup.rpartition('__')[0]}"
    return found.end(boundary) if boundary in found.re.groupindex else found.end()


class _JsonScan:
    """The place in a JSON value: how deep in brackets, and if in a string."""

    def __init__(self) -> None:
        self.is_closed = False
        self.is_broken = False
        self._depth = 0
        self._is_in_string = False

    def advance(self, buffer: str, at: int, emit: Callable[[str], None]) -> int:
        """Emit the text from `at` on, with control characters in strings escaped; return the place where it stops."""
        start = at
        while True:
            at = (_JSON_STRING if self._is_in_string else _OUTSIDE).match(buffer, at).end()  # type: ignore[union-attr]
            character = buffer[at : at + 1]
            escaped = buffer[at + 1 : at + 2] if self._is_in_string and character == "\\" else character
            if not escaped or (not self._is_in_string and character not in '"{[]}'):
                self.is_broken = bool(escaped)
                break
            if self._is_in_string and character != '"':  # a control character, maybe behind a backslash
                if at > start:
                    emit(buffer[start:at])
                emit(json.dumps(escaped)[1:-1])
                start = at = at + (2 if character == "\\" else 1)
                continue
            at += 1
            if character == '"':
                self._is_in_string = not self._is_in_string
                continue
            self._depth += 1 if character in "{[" else -1
            if self._depth == 0:
                self.is_closed = True
                break
        if at > start:
            emit(buffer[start:at])
        return at


class Reader:
    """The text that was not consumed yet, and the ways to consume it."""

    def __init__(self) -> None:
        self.buffer = ""
        self.at = 0
        self.is_last = False  # no more text comes
        self.kept: list[str] | None = None  # what was consumed, while a call may turn out to be none
        self.num_kept = 0  # its characters, or more

    def add(self, text: str) -> None:
        """Append a piece of text; what was consumed is dropped."""
        self.buffer = self.buffer[self.at :] + text
        self.at = 0

    @property
    def is_cut(self) -> bool:
        """Return whether the output ended with all of its text consumed, but for a beginning of what was expected."""
        return self.is_last and self.at == len(self.buffer)

    def keep(self, text: str) -> list[str]:
        """Keep what is consumed from now on, behind `text`; return the list of it."""
        self.kept = [text]
        self.num_kept = len(text)
        return self.kept

    def match(self, pattern: re.Pattern[str]) -> Steps[re.Match[str] | None]:
        """Consume what the pattern matches here, or return None; at a cut, its beginning is consumed too."""
        while True:
            found = pattern.match(self.buffer, self.at)
            if found is None:
                return None
            if kind_of(found):
                self._consume(_stop(found))
                return found
            if self.is_last:
                self._consume(len(self.buffer))
                return None
            yield

    def copy_until(
        self, pattern: re.Pattern[str], emit: Callable[[str], None], at_end: re.Pattern[str] | None = None
    ) -> Steps[re.Match[str] | None]:
        """Emit text up to the first match of the pattern, and consume that; None at the end of the output.

        A beginning of the pattern at the end of the output is emitted as well, but is a match if `at_end` matches it.
        """
        while True:
            found = pattern.search(self.buffer, self.at)
            stop = len(self.buffer) if found is None else found.start()
            if stop > self.at:
                emit(self.buffer[self.at : stop])
                self.at = stop
            if found is not None and kind_of(found):
                self.at = _stop(found)
                return found
            if self.is_last:
                rest, self.at = self.buffer[self.at :], len(self.buffer)
                if at_end is not None and (found := at_end.match(rest)):
                    return found
                if rest:
                    emit(rest)
                return None
            yield

    def skip_space(self) -> Steps[None]:
        """Consume white space, of any length."""
        while True:
            self._consume(_SPACE.match(self.buffer, self.at).end())  # type: ignore[union-attr]
            if self.is_last or self.at < len(self.buffer):
                return
            yield

    def copy_string(self, emit: Callable[[str], None], limit: int) -> Steps[bool]:
        """Emit what follows up to the next quote that is not escaped, and consume that; False if there is none."""
        while True:
            stop = _STRING.match(self.buffer, self.at).end()  # type: ignore[union-attr]
            if stop > self.at:
                limit -= stop - self.at
                emit(self.buffer[self.at : stop])
                self._consume(stop)
            if limit < 0 or self.is_cut:
                return False
            if stop < len(self.buffer) and self.buffer[stop] == '"':
                self._consume(stop + 1)
                return True
            if self.is_last:
                self._consume(len(self.buffer))
                return False
            yield

    def copy_json(self, emit: Callable[[str], None], limit: int | None = None) -> Steps[bool]:
        """Emit the JSON value in brackets that starts here; brackets in strings are text.

        Return False if it does not end, at a character that JSON has in strings only, which is not consumed, or when
        more than `limit` characters were emitted. The first character, if there is one, must have come.
        """
        if self.buffer[self.at : self.at + 1] not in ("{", "["):
            return False
        scan = _JsonScan()
        while True:
            at = scan.advance(self.buffer, self.at, emit)
            limit = None if limit is None else limit - (at - self.at)
            self._consume(at)
            if scan.is_closed or scan.is_broken or (limit is not None and limit < 0):
                return scan.is_closed
            if self.is_last:
                self._consume(len(self.buffer))
                return False
            yield

    def _consume(self, stop: int) -> None:
        if self.kept is not None:
            self.kept.append(self.buffer[self.at : stop])
            self.num_kept += stop - self.at
        self.at = stop
