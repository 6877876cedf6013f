"""Checks of single values that came from outside: right type, right range, or an error that names all three.

Each check returns the value in its final form (a float for a number, a tuple for a list) and runs in time linear in
what it is given. A bool is no integer here, and NaN lies in no range.
"""

import inspect
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast

from quire.core.errors import InvalidRequestError

T = TypeVar("T")

MAX_INT = 2**31 - 1  # counts and token ids are stored and sent as 32-bit integers

_MAX_SHOWN_CHARS = 80
_MAX_SHOWN_BITS = 128


def shown(value: object) -> str:
    """Return `value` for an error text, short whatever a client sent."""
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"  # repr() of a very long one raises
    if isinstance(value, list | tuple | set | frozenset | dict):
        return f"a {type(value).__name__} of {len(value)}"  # repr() would take time and memory for what is cut off
    text = repr(value[:_MAX_SHOWN_CHARS] if isinstance(value, str | bytes) else value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "..."


def nearest(name: str, known: Iterable[str], cutoff: float = 0.7) -> str:
    """Return "; did you mean X?" for a name with a similarity of at least `cutoff` to one of `known`, else nothing."""
    near = get_close_matches(name, [*known], 1, cutoff)
    return f"; did you mean {near[0]}?" if near else ""


def suggest_names(owner: type[T]) -> type[T]:
    """Decorate a class: the TypeError for a keyword argument that it does not have names the nearest that it has."""
    construct = owner.__init__
    known = [*inspect.signature(owner).parameters]

    @wraps(construct)
    def checked(self: T, *args: Any, **named: Any) -> None:  # noqa: ANN401 (those of `construct`)
        try:
            construct(self, *args, **named)
        except TypeError:
            for name in named.keys() - known:
                message = f"{owner.__name__}() got an unexpected keyword argument {name!r}{nearest(name, known)}"
                raise TypeError(message) from None
            raise

    owner.__init__ = checked  # type: ignore[assignment]
    return owner


def refuse(field: str, value: object, expected: str) -> NoReturn:
    """Raise the error for a value of `field` that is not `expected`."""
    raise InvalidRequestError(f"{field} must be {expected}, got {shown(value)}", param=field)


def check_int(field: str, value: object, low: int, high: int = MAX_INT) -> int:
    """Return `value` if it is an integer in [low, high]."""
    if type(value) is not int or not low <= value <= high:
        refuse(field, value, f"an integer from {low} to {high}")
    return value


def check_optional_int(field: str, value: object, low: int, high: int = MAX_INT) -> int | None:
    """Return `value` if it is None or an integer in [low, high]."""
    return None if value is None else check_int(field, value, low, high)


def check_float(field: str, value: object, low: float, high: float, *, above_low: bool = False) -> float:
    """Return `value` as a float if it is a number in [low, high], or in (low, high] with `above_low`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (above_low and value == low):  # type: ignore[operator]
        start = "above" if above_low else "from"
        refuse(field, value, f"a number {start} {low:g} to {high:g}")
    return float(value)  # type: ignore[arg-type]


def check_bool(field: str, value: object) -> bool:
    """Return `value` if it is True or False."""
    if not isinstance(value, bool):
        refuse(field, value, "true or false")
    return value


def check_token_ids(field: str, value: object) -> tuple[int, ...]:
    """Return `value` as a tuple if it is a list of integers in [0, MAX_INT]."""
    ids = _elements(field, value, "a list of token ids")
    for token in ids:
        if type(token) is not int or not 0 <= token <= MAX_INT:
            refuse(field, token, f"a list of token ids from 0 to {MAX_INT}")
    return tuple(ids)  # type: ignore[arg-type]


def check_text(field: str, value: object, max_chars: int) -> str:
    """Return `value` if it is a string of 1 to `max_chars` characters."""
    if not isinstance(value, str) or not 0 < len(value) <= max_chars or not _is_unicode([value]):
        refuse(field, value, f"a string of 1 to {max_chars} characters of valid Unicode")
    return value


def check_strings(field: str, value: object) -> tuple[str, ...]:
    """Return `value` as a tuple if it is a list of strings, none of them empty."""
    texts = _elements(field, value, "a list of strings that are not empty")
    for text in texts:
        if not isinstance(text, str) or not text:
            refuse(field, text, "a list of strings that are not empty")
    if not _is_unicode(texts):  # type: ignore[arg-type]
        refuse(field, value, "a list of valid Unicode strings")
    return tuple(texts)  # type: ignore[arg-type]


def one_each(name: str, given: T | Sequence[T] | None, default: T, num_prompts: int) -> list[T]:
    """Return one value per prompt, from one for all or one for each."""
    if not isinstance(given, (list, tuple)):
        return [default if given is None else cast(T, given)] * num_prompts
    if len(given) != num_prompts:
        raise InvalidRequestError(
            f"{name} must be one for all or one per prompt: got {len(given)} for {num_prompts} prompts", param=name
        )
    return list(given)


def _elements(field: str, value: object, expected: str) -> tuple[object, ...]:
    """Return the elements of a list or tuple; a string is neither."""
    if not isinstance(value, list | tuple):
        refuse(field, value, expected)
    return tuple(value)


def _is_unicode(texts: Iterable[str]) -> bool:
    """Return whether the texts can be written as UTF-8: JSON can smuggle in half a surrogate pair, which cannot."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True
