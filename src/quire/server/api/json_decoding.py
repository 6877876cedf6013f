"""Decoding of large JSON objects in slices, so that no call of the parser blocks the event loop for long.

A parser in C holds the interpreter lock until it returns, in a thread too. So the work is done slice by slice. First
depth and values are counted, which is cheap, and a text with too much of either is refused. Then a scan finds the
members of the object and the commas at which long values can be split. Then each member is decoded by itself, and a
long list or object in batches. Members that the caller does not want are validated but not built.

A value is a string, a list or an object here. Numbers, true, false and null are not counted: they are cheap, and lists
of token ids are long.
"""

import operator
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Iterator
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

SLICE_BYTES = 1 << 16     # text per slice: 1 ms of decoding a list of numbers
SLICE_VALUES = 2048       # values per slice: 0.5 ms of decoding
STRING_BYTES = 1 << 20    # text decoded at once that is long by strings: 0.3 ms, 3 if all of it is escapes
_MAX_BACKSLASHES = 64     # looked at in front of a quote
_CUT_BYTES = 1 << 13      # between two places at which a list of numbers can be split
_MEMBER_BYTES = 256       # overhead of one member, as bytes of text

_NESTING = np.zeros(256, dtype=np.int32)  # change of the depth by each byte
_NESTING[list(b"[{")], _NESTING[list(b"]}")] = 1, -1
_QUOTE, _OPENING, _CLOSING = ord('"'), b"[{", b"]}"
_CLOSING_OFFSET = 2       # from an opening bracket to its closing one, in ASCII
_BLANK = b" \t\n\r"
_TOKEN = re.compile(rb'"[^"]*+"?|[\[{]|[\]}]|[^"\[\]{}]++')
_NAME = re.compile(rb'[ \t\n\r]*+("(?:[^"\\]|\\.){0,256}+")[ \t\n\r]*+:')  # a longer one is not split from its value
_BLANKS = re.compile(rb"[ \t\n\r]*+")
_COLON = re.compile(rb"[ \t\n\r]*+:")
_PLACE = re.compile(r"\(byte (\d+)\)")

T = TypeVar("T")
Slices = Generator[None, None, T]
Decode = Callable[[bytes], Any]

_decode_raw = msgspec.json.Decoder(msgspec.Raw).decode
loads: Decode = msgspec.json.decode


class JsonError(ValueError):
    """The text is not valid JSON."""


class TooDeepError(ValueError):
    """Lists and objects are nested deeper than the limit."""


class TooManyValuesError(ValueError):
    """The text has more values than the limit."""


class _Cut(NamedTuple):
    """A comma: its place, the number of lists and objects around it, and the number of values before it."""

    place: int
    depth: int
    num_values: int


class _Member(NamedTuple):
    """Places of a member of the object, from comma to comma; `key_stop` 0: it has no key."""

    start: int
    stop: int
    key_start: int
    key_stop: int


def decoded(raw: bytes, wanted: Collection[str], max_depth: int, max_values: int) -> Slices[Any]:
    """Decode a text, yielding between slices of the work. Of equal names the last counts.

    Members with a name that is not `wanted` have the value None. For anything but an object only the type is right.
    Raises JsonError, TooDeepError, or TooManyValuesError if the text has more than `max_values` values.
    """
    scan = _Scan(raw, max_depth, max_values)
    yield from scan.run()
    if scan.kind != b"{":
        yield from _value(scan, 0, len(raw), _validated, depth=1)
        return [] if scan.kind == b"[" else _at(0, loads, raw)
    found: dict[str, Any] = {}
    num_bytes = 0                                 # decoded since the last slice ended
    for member in scan.members():
        name, start = _key_of(raw, member)
        value = yield from _value(scan, start, member.stop, loads if name in wanted else _validated)
        found[name] = value if name in wanted else None
        num_bytes += member.stop - member.start + _MEMBER_BYTES
        if num_bytes > SLICE_BYTES:
            num_bytes = 0
            yield
    return found


def bounds_beside_strings(raw: bytes) -> tuple[int, int]:
    """Return upper bounds of a text's strings, lists and objects, and of its depth; both too high for a long decode.

    Strings are copied as they are decoded, so that long ones take little time: it has at most STRING_BYTES, and
    SLICE_BYTES beside its strings. Takes 20 us for 450 KB with some quotes.
    """
    place = num_values = num_outside = depth = most_depth = 0
    is_inside, too_many = False, (SLICE_VALUES + 1, SLICE_VALUES + 1)
    for _ in range(0 if len(raw) > STRING_BYTES else 2 * SLICE_VALUES):
        stop = raw.find(b'"', place)
        if is_inside:
            tail = raw[max(stop - _MAX_BACKSLASHES, place) : stop]
            num_backslashes = len(tail) - len(tail.rstrip(b"\\"))
            if num_backslashes == _MAX_BACKSLASHES:
                return too_many
            is_inside = num_backslashes % 2 == 1  # an escaped quote ends no string
        else:
            outside = raw[place : stop if stop >= 0 else len(raw)]
            num_outside += len(outside)
            num_opened = outside.count(b"[") + outside.count(b"{")
            num_values += 1 + num_opened
            most_depth = max(most_depth, depth + num_opened)
            depth += num_opened - outside.count(b"]") - outside.count(b"}")
            is_inside = True
        if num_outside > SLICE_BYTES:
            return too_many
        if stop < 0:
            return num_values, most_depth
        place = stop + 1
    return too_many


def check_size(raw: bytes, max_depth: int, max_values: int) -> Slices[None]:
    """Raise TooDeepError or TooManyValuesError if the text is past a bound. Takes 1 to 4 % of a scan's time."""
    place = num_values = depth = 0
    is_inside = False                             # the place lies in a string
    while place < len(raw):
        stop = place + SLICE_BYTES
        text = _without_escapes(raw[place:stop], is_last=stop >= len(raw))
        parts = text.split(b'"')
        outside = b"".join(parts[is_inside::2])
        num_strings = len(parts[not is_inside :: 2]) - is_inside
        num_brackets = outside.count(b"[") + outside.count(b"{")
        if num_brackets > max_depth - depth:
            depths = depth + np.cumsum(_NESTING[np.frombuffer(outside, dtype=np.uint8)])
            if depths.max() > max_depth:
                raise TooDeepError(f"nested deeper than {max_depth} levels")
        depth += num_brackets - outside.count(b"]") - outside.count(b"}")
        num_values += num_strings + num_brackets
        if num_values > max_values:
            raise TooManyValuesError(f"more than {max_values} strings, lists and objects")
        is_inside ^= len(parts) % 2 == 0
        place += len(text)
        yield


class _Scan:
    """Structure of a text: the members of the object, and commas. Brackets and commas inside strings do not count."""

    def __init__(self, raw: bytes, max_depth: int, max_values: int) -> None:
        self.raw, self._max_depth, self._max_values = raw, max_depth, max_values
        self.cuts: list[_Cut] = []                # ascending by place
        self._keys: list[tuple[int, int]] = []    # places of the object's keys
        self._depth = self._num_values = 0
        self._start = self._stop = -1             # places of the object's brackets
        self._string_start = -1                   # start of a string that has not ended
        self._awaits_key = False

    def run(self) -> Slices[None]:
        """Scan the whole text."""
        yield from check_size(self.raw, self._max_depth, self._max_values)
        place = 0
        while place < len(self.raw):
            stop = place + SLICE_BYTES
            text = _without_escapes(self.raw[place:stop], is_last=stop >= len(self.raw))
            yield from self._scan_slice(text, place)
            place += len(text)
            yield
        if self._depth or self._string_start >= 0:
            raise JsonError("Input data was truncated")
        if self._start > 0 and self.raw[: self._start].strip(_BLANK):
            raise JsonError("JSON is malformed: invalid character (byte 0)")
        if self._stop >= 0 and self.raw[self._stop + 1 :].strip(_BLANK):
            raise JsonError(f"JSON is malformed: trailing characters (byte {self._stop + 1})")

    @property
    def kind(self) -> bytes:
        """The bracket that the text begins with; nothing if it has none."""
        return self.raw[self._start : self._start + 1] if self._start >= 0 else b""

    def members(self) -> Iterator[_Member]:
        """Yield the members of the object."""
        start, keys = self._start + 1, iter(self._keys)
        if not self.cuts and not self.raw[start : self._stop].strip(_BLANK):
            return
        key = next(keys, (self._stop, 0))
        for stop in chain((cut.place for cut in self.cuts if cut.depth == 1), (self._stop,)):
            if start <= key[0] < stop:
                yield _Member(start, stop, *key)
                key = next(keys, (self._stop, 0))
            else:
                yield _Member(start, stop, start, 0)
            start = stop + 1

    def values_before(self, place: int) -> int:
        """Count the values before a place, counted at the first comma at or after it."""
        number = bisect_left(self.cuts, place, key=_place_of)
        return self.cuts[number].num_values if number < len(self.cuts) else self._num_values

    def elements(self, start: int, stop: int, depth: int) -> Iterator[tuple[int, int]]:
        """Yield the places at which elements end, and the values before; where they are numbers, only some."""
        low, high = (bisect_left(self.cuts, place, key=_place_of) for place in (start, stop))
        for number in range(low, high):
            cut = self.cuts[number]
            if cut.depth == depth:
                yield cut.place, cut.num_values
        yield stop, self.values_before(stop)

    def _scan_slice(self, text: bytes, base: int) -> Slices[None]:
        position = 0
        if self._string_start >= 0:
            position = text.find(b'"') + 1
            if not position:
                return
            self._finish_string(base + position)
        for number, token in enumerate(_TOKEN.finditer(text, position)):
            self._scan_token(text, token.start(), token.end(), base)
            if number % SLICE_VALUES == SLICE_VALUES - 1:
                yield

    def _scan_token(self, text: bytes, start: int, stop: int, base: int) -> None:
        kind = text[start]
        if kind == _QUOTE:
            self._num_values += 1
            self._string_start = base + start
            if stop - start > 1 and text[stop - 1] == _QUOTE:
                self._finish_string(base + stop)
        elif kind in _OPENING:
            self._enter_container(base + start)
        elif kind in _CLOSING:
            self._leave_container(base + start)
        else:
            self._record_commas(text, start, stop, base)

    def _enter_container(self, place: int) -> None:
        if self._depth == 0:
            if self._start >= 0:
                raise JsonError(f"JSON is malformed: trailing characters (byte {place})")
            self._start, self._awaits_key = place, True
        self._depth += 1
        self._num_values += 1

    def _leave_container(self, place: int) -> None:
        if self._depth == 0:
            raise JsonError(f"JSON is malformed: invalid character (byte {place})")
        self._depth -= 1
        if self._depth == 0:
            if self.raw[place] - self.raw[self._start] != _CLOSING_OFFSET:
                raise JsonError(f"JSON is malformed: invalid character (byte {place})")
            self._stop = place

    def _finish_string(self, place: int) -> None:
        if self._awaits_key and self._depth == 1:
            self._keys.append((self._string_start, place))
            self._awaits_key = False
        self._string_start = -1

    def _record_commas(self, text: bytes, start: int, stop: int, base: int) -> None:
        """Record the first and the last comma between two strings or brackets, and some of those in between."""
        comma, last = text.find(b",", start, stop), text.rfind(b",", start, stop)
        while comma >= 0:
            self.cuts.append(_Cut(base + comma, self._depth, self._num_values))
            if comma == last:
                break
            following = text.find(b",", comma + _CUT_BYTES, stop)
            comma = last if following < 0 else following
        if last >= 0 and self._depth == 1:
            self._awaits_key = True


def _without_escapes(text: bytes, *, is_last: bool) -> bytes:
    """Return a slice in which all quotes delimit strings; shorter by one if its last byte begins an escape."""
    if b"\\" not in text:
        return text
    plain = text.replace(b"\\\\", b"..").replace(b'\\"', b"..")
    return plain[:-1] if plain.endswith(b"\\") and not is_last else plain


def _key_of(raw: bytes, member: _Member) -> tuple[str, int]:
    """Return the name of a member, and where its value begins."""
    colon = _COLON.match(raw, member.key_stop)
    if not member.key_stop or colon is None or raw[member.start : member.key_start].strip(_BLANK):
        raise JsonError(f"JSON is malformed: expected a name and ':' (byte {member.start})")
    name: str = _at(member.key_start, loads, raw[member.key_start : member.key_stop])
    return name, colon.end()


def _value(scan: _Scan, start: int, stop: int, decode: Decode, depth: int = 2) -> Slices[Any]:
    """Decode a value with elements at `depth`: a long list or object in batches, anything else at once."""
    raw, (first, last) = scan.raw, _trimmed(scan.raw, start, stop)     # long values inside of long ones are not copied
    brackets = raw[first : first + 1] + raw[last - 1 : last]
    is_long = _is_long(last - first, scan.values_before(stop) - scan.values_before(start))
    if not is_long or brackets not in (b"[]", b"{}") or operator.eq(*_trimmed(raw, first + 1, last - 1)):
        return _at(start, decode, raw[first:last])
    parts: list[Any] = []
    for begin, end, is_alone in _batches(scan, first + 1, last - 1, depth):
        if is_alone and brackets == b"[]":
            parts.append([(yield from _value(scan, begin, end, decode, depth + 1))])
        elif is_alone and (name := _NAME.match(raw, begin, end)):
            key = _at(begin, loads, name[1])
            parts.append({key: (yield from _value(scan, name.end(), end, decode, depth + 1))})
        else:
            parts.append(_batch(raw, begin, end, decode, brackets))
        yield
    if decode is _validated:
        return None
    return list(chain.from_iterable(parts)) if brackets == b"[]" else dict(chain.from_iterable(map(dict.items, parts)))


def _trimmed(raw: bytes, start: int, stop: int) -> tuple[int, int]:
    """Return where a piece of the text begins and ends without the blanks around it."""
    found = _BLANKS.match(raw, start, stop)
    start = stop if found is None else found.end()
    while stop > start and raw[stop - 1] in _BLANK:
        tail = raw[max(start, stop - SLICE_BYTES) : stop]
        stop -= len(tail) - len(tail.rstrip(_BLANK))
    return start, stop


def _batch(raw: bytes, start: int, stop: int, decode: Decode, brackets: bytes) -> Any:  # noqa: ANN401 (JSON)
    """Decode adjacent elements of a list, or members of an object."""
    text = raw[start:stop]
    if not text.strip(_BLANK):
        raise JsonError(f"JSON is malformed: expected a value (byte {start})")
    return _at(start - 1, decode, brackets[:1] + text + brackets[1:])


def _batches(scan: _Scan, start: int, stop: int, depth: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the pieces of a list or object, and whether a piece is a single long element."""
    start_values = scan.values_before(start)
    element, element_values = start, start_values
    for place, num_values in scan.elements(start, stop, depth):
        if _is_long(place - element, num_values - element_values):
            if element > start:
                yield start, element - 1, False
            yield element, place, True
            start, start_values = place + 1, num_values
        elif _is_long(place - start, num_values - start_values):
            yield start, place, False
            start, start_values = place + 1, num_values
        element, element_values = place + 1, num_values
    if start <= stop:
        yield start, stop, False


def _is_long(num_bytes: int, num_values: int) -> bool:
    return num_bytes > SLICE_BYTES or num_values > SLICE_VALUES


def _validated(text: bytes) -> None:
    """Check that a text is JSON without building its values."""
    _decode_raw(text)
    text.decode()


def _at(place: int, decode: Decode, text: bytes) -> Any:  # noqa: ANN401 (JSON)
    """Decode the piece of the text at `place`. JsonError names the byte of the whole text."""
    try:
        return decode(text)
    except msgspec.DecodeError as error:
        message = _PLACE.sub(lambda found: f"(byte {place + int(found[1])})", str(error))
        raise JsonError(message) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise JsonError(str(error)) from error


def _place_of(cut: _Cut) -> int:
    return cut.place
