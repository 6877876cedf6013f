"""Translation of arguments in other notations than JSON, as they come: Python's literals, and Gemma's."""

import json
from collections.abc import Callable

from quire.text.tool_formats.json_values import json_value, string_text
from quire.text.tool_formats.reader import SPACE, Reader, Steps, any_of, atoms, kind_of, number_of, sequence
from quire.text.tool_formats.syntax import GEMMA_KEY, PYTHON_KEY

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
