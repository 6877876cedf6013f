"""Option declarations: meaning, bounds, unit and flag of a setting, kept as metadata of its dataclass field.

The checks at construction, the flags of the command line and the tables of docs/reference.md are made from them.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from quire.core.checks import shown
from quire.core.errors import ConfigError

SIZE = "SIZE"  # metavar of bytes, which may be given as text such as "4MiB"
MS = "MS"      # metavar of milliseconds, a number or "none"
LONGEST_MS = 3_600_000
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Declaration of one setting. Its name, type and default are those of the field."""

    help: str                                   # one line, for --help
    row: str = ""                               # Markdown for the reference page; empty: `help`
    past: str = ""                              # a limit's, Markdown: the answer to a request that exceeds it
    kind: Literal["flag", "argument", "none"] = "flag"  # on the command line
    short: str | None = None                    # one-letter flag beside the long one: "-q"
    panel: str | None = None                    # heading in --help
    low: float = -math.inf
    high: float = math.inf
    is_low_excluded: bool = False
    unit: str = ""
    shown_default: str | None = None            # shown instead of the default
    flag_default: Any = None                    # the flag's default, where the field's is None
    metavar: str | None = None
    is_secret: bool = False                     # left out of the repr
    parse: Callable[[list[str]], Any] | None = None  # for a repeatable flag: its texts to the field's value
    settings: tuple[tuple[str, Any], ...] = ()  # further arguments of typer, by name


class Declared(NamedTuple):
    """A field of a dataclass with its type and its option."""

    name: str
    hint: Any
    default: Any
    option: Option


def option(default: object, help_text: str, **settings: Any) -> Any:  # noqa: ANN401 (stands for the field's value)
    """Return a dataclass field with an Option. A list is the default of a flag that may be given several times."""
    return _field(default, Option(help=help_text, **settings))


def same_option(owner: type[Any], name: str, **changes: Any) -> Any:  # noqa: ANN401 (as `option`)
    """Return a field with the default and the option of `owner`'s field `name`, but for `changes`."""
    declared = next(each for each in declared_options(owner) if each.name == name)
    return _field(declared.default, replace(declared.option, **changes))


def _field(default: object, made: Option) -> object:
    metadata = {"option": made}
    if isinstance(default, list):
        return field(default_factory=default.copy, repr=not made.is_secret, metadata=metadata)
    return field(default=default, repr=not made.is_secret, metadata=metadata)


def declared_options(owner: type[Any]) -> list[Declared]:
    """Return the fields of a dataclass that have an option, in order."""
    hints = get_type_hints(owner, include_extras=True)
    return [
        Declared(each.name, hints[each.name], _default(each), each.metadata["option"])
        for each in fields(owner)
        if "option" in each.metadata
    ]


def _default(of: Field[Any]) -> object:
    return of.default if of.default_factory is MISSING else of.default_factory()


def check_options(options: object) -> None:
    """Raise ConfigError, with name, value and bounds, for the first value that its option does not allow.

    Elements of tuples are for the class itself to check.
    """
    for name, hint, _, declared in declared_options(type(options)):
        value, kinds = getattr(options, name), set(get_args(hint)) or {hint}
        if (value is None and NoneType in kinds) or get_origin(hint) is tuple:
            continue
        choices = [choice for kind in (hint, *kinds) if get_origin(kind) is Literal for choice in get_args(kind)]
        if choices:
            if value not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")
        elif declared.metavar == SIZE:
            parse_bytes(value, name, int(max(declared.low, 0)))
        elif declared.metavar == MS:
            parse_ms(value, name)
        elif bool in kinds:
            if not isinstance(value, bool):
                raise ConfigError(f"{name} must be True or False, got {value!r}")
        elif kinds & {int, float}:
            _check_number(name, value, declared, float in kinds)
        elif str in kinds and not isinstance(value, str):
            raise ConfigError(f"{name} must be text, got {value!r}")


def _check_number(name: str, value: object, declared: Option, is_float: bool) -> None:
    if isinstance(value, int | float if is_float else int) and not isinstance(value, bool):
        is_above = value > declared.low if declared.is_low_excluded else value >= declared.low
        if is_above and value <= declared.high and value not in (math.inf, -math.inf):
            return
    kind = "a number" if is_float else "an integer"
    raise ConfigError(f"{name} must be {kind}{_span(declared)}{declared.unit and ' ' + declared.unit}, got {value!r}")


def _span(declared: Option) -> str:
    """Return the bounds in words, with a space before them if there are any."""
    low, high = f"{declared.low:.15g}", f"{declared.high:.15g}"
    if math.isinf(declared.low):
        return ""
    if declared.is_low_excluded:
        return f" above {low}" + ("" if math.isinf(declared.high) else f", at most {high}")
    return f" of at least {low}" if math.isinf(declared.high) else f" from {low} to {high}"


def parse_json_object(text: str, name: str) -> dict[str, Any]:
    """Return the keys of a JSON object, none for an empty text. ConfigError names `name`."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} must be a JSON object, got {shown(text)}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{name} must be a JSON object, got {shown(text)}")
    return found


def parse_ms(value: float | str, name: str) -> float:
    """Return milliseconds from a number, or a text of one, above 0 and at most an hour; `none` is infinity.

    ConfigError names `name`.
    """
    if value == "none":
        return math.inf
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number <= LONGEST_MS:
        raise ConfigError(f"{name} must be none, or a number above 0, at most {LONGEST_MS} ms, got {shown(value)}")
    return number


def parse_bytes(value: int | str, name: str, low: int = 1) -> int:
    """Return a number of bytes from an integer or a text such as "512MiB" or "4GiB". ConfigError names `name`."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([a-zA-Z]*)\s*", str(value))
        if match is None or match[2].upper() not in _UNITS:
            raise ConfigError(f"{name} must be bytes such as 512MiB or 4GiB, got {value!r}")
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size < low:
        raise ConfigError(f"{name} must be at least {low} bytes, got {value!r}")
    return size
