"""Numbers and formats of strings in schemas, as llguidance 1.9 reads them: rewritten where it reads others.

Numbers that it cannot hold are refused. It holds bounds as int64 and float64. It reads a float64 as its digits,
rounded, by a power of ten, rounded again: often the next one, as 99 for 99.00000000000001. And it writes the bare
integer of an exclusive bound where both bounds have the same integer part: with a maximum of 0.5 an exclusive minimum
of 0 would allow 0. Such a bound becomes the next float64, inclusive; next to 0 that has too many digits, and numbers
nearer to 0 than 1e-60 are left out instead.

Formats are regular expressions of the whole string: RFC 3339 (dates, times, durations), RFC 1123 (host names), RFC 2673
and 4291 (addresses), RFC 3986 (URIs), RFC 4122 (UUIDs), and the part of RFC 5321 without quoted names (email). Their
names are those that llguidance enforces in JSON.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from quire.core.checks import shown
from quire.grammar_writing.schemas import refuse, rewritten_below

MAX_NUMBER = 2**53           # larger integers have neighbours with the same float64
MAX_INT64 = 2**63 - 1        # a maximum from here on excludes no integer that is written
MIN_NUMBER = 1e-60           # a regular expression has a group for each digit, and at most some 80 inside of each other
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_VALUES = ("const", "enum")
_NUMBERS = (*_LOWER, *_UPPER, "multipleOf")


def check_numbers(schema: Mapping[str, Any], place: str) -> None:
    """Raise SchemaError, with the keyword, for a number of this schema that no grammar holds."""
    for key in (*_NUMBERS, *_VALUES):
        for value in _numbers(schema.get(key)):
            is_open = key in _UPPER and value >= MAX_INT64
            if abs(value) > MAX_NUMBER and not is_open:
                refuse(f"{place}/{key}", f"{shown(value)} is beyond 2**53, up to which grammars hold numbers")
            if 0 < abs(value) < MIN_NUMBER and key not in _VALUES:
                refuse(f"{place}/{key}", f"{shown(value)} is nearer to 0 than {MIN_NUMBER}, down to which they do")
            if not is_open and _written(key, value) is None:
                refuse(f"{place}/{key}", f"{shown(value)} has more digits than grammars hold")


def has_fraction(schema: object) -> bool:
    """Return whether a bound of this schema is no integer; two integers are far enough apart."""
    given = (schema.get(key) for key in (*_LOWER, *_UPPER)) if isinstance(schema, Mapping) else ()
    return any(_is_number(value) and value != value // 1 for value in given)


def with_inclusive_bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with inclusive bounds in place of the exclusive integers that llguidance may write."""
    result = dict(schema)
    for (inclusive, exclusive), sign, nearest in ((_LOWER, 1, max), (_UPPER, -1, min)):
        value, other = schema.get(exclusive), schema.get(inclusive)
        if _is_number(value) and value == value // 1 and value * sign >= 0 and schema.get("type") != "integer":
            bound = math.nextafter(value, sign * math.inf) if value else sign * MIN_NUMBER
            result[inclusive] = nearest(bound, other) if _is_number(other) else bound
            del result[exclusive]
    return result


def with_written_numbers(schema: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return a schema with numbers in the texts of which llguidance reads those of this one."""
    below = rewritten_below(schema, with_written_numbers)
    if not isinstance(below, dict):
        return below
    return {key: _all_written(key, value) if key in (*_NUMBERS, *_VALUES) else value for key, value in below.items()}


def _all_written(key: str, value: Any) -> Any:  # noqa: ANN401 (JSON)
    if isinstance(value, Mapping):
        return {name: _all_written(key, part) for name, part in value.items()}
    if isinstance(value, list):
        return [_all_written(key, part) for part in value]
    return value if not isinstance(value, float) or (written := _written(key, value)) is None else written


def _written(key: str, value: float) -> float | None:
    """Return the float64 in the text of which llguidance reads a number, or the next number inside of a bound."""
    if isinstance(value, int) or _read(value) == value:
        return value
    sign = 1 if key in _LOWER else -1 if key in _UPPER else 0
    reads = {_read(near): near for near in (value + number * math.ulp(value) for number in range(-2, 3))}
    inside = [read for read in reads if read == value or (read - value) * sign > 0]
    return reads[min(inside, key=lambda read: abs(read - value))] if inside else None


def _read(value: float) -> float:
    """Return the float64 that llguidance reads in the text of another."""
    mantissa, _, exponent = repr(abs(value)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits, power = float(int(whole + fraction)), int(exponent or 0) - len(fraction)
    return math.copysign(digits * float(f"1e{power}") if power >= 0 else digits / float(f"1e{-power}"), value)


def _numbers(value: object) -> Iterator[float]:
    """Yield all numbers in a JSON value."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _numbers(part)
    elif _is_number(value):
        yield value


def _is_number(value: Any) -> TypeGuard[int | float]:  # noqa: ANN401 (JSON)
    return isinstance(value, int | float) and not isinstance(value, bool)


_MONTHS = r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DATE = rf"[0-9]{{4}}-{_MONTHS}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME_PART = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DATE_PART = r"(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_HEX = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join([
    rf"(?:{_HEX}:){{7}}{_HEX}",
    *(rf"(?:{_HEX}:){{{before}}}(?::{_HEX}){{1,{7 - before}}}" for before in range(1, 7)),
    rf":(?::{_HEX}){{1,7}}",
    rf"(?:{_HEX}:){{1,7}}:",
    "::",
])  # fmt: skip
_CHARACTER = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_PATH = rf"(?:/{_CHARACTER}*)*"
_AUTHORITY = rf"//(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{{2}})*(?::[0-9]*)?{_PATH}"
_QUERY = rf"(?:\?(?:{_CHARACTER}|[/?])*)?(?:#(?:{_CHARACTER}|[/?])*)?"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"

FORMATS: Mapping[str, str] = {
    "date-time": rf"(?:{_DATE})[Tt](?:{_TIME})",
    "time": _TIME,
    "date": _DATE,
    "duration": rf"P(?:{_DATE_PART}(?:{_TIME_PART})?|{_TIME_PART}|[0-9]+W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}|/?{_CHARACTER}+{_PATH}){_QUERY}",
    "uuid": "[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}",
}
