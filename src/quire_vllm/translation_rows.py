"""Row of the table of vLLM's arguments, and functions that write rows of one kind."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

Takes = Literal["switch", "number", "real", "text", "optional text", "list", "json"]
Does = Literal["same", "renamed", "accepted", "refused"]


@dataclass(frozen=True, slots=True)
class Row:
    """An argument of vLLM: the flag `--its-name` of `serve`, and, of the engine, a keyword of `LLM` too.

    An option of Quire with the argument's own name takes it, whatever the row says. The `sentence` is a difference
    ("same", "renamed"), the reason that there is no effect ("accepted"), or that there is no support ("refused").
    """

    name: str
    takes: Takes = "text"
    allowed: tuple[Any, ...] = ()        # for a refused one: values without effect, beside those that are empty
    flags: tuple[str, ...] = ()          # beside the long one
    does: Does = "same"
    sentence: str = ""
    own: str = ""                        # option of Quire that it sets, where that has another name
    convert: Callable[[Any, str], Any] | None = None  # from a value, and the name for errors, to the own option's value
    spread: Callable[[Any, str], dict[str, Any]] | None = None  # the same, to the values of several own options
    is_engine: bool = True               # else of servers alone
    is_current: bool = True              # exists in vLLM 0.33, else in a version before

    @property
    def flag(self) -> str:
        """The long flag."""
        return "--" + self.name.replace("_", "-")


def switch(name: str, *flags: str, allowed: tuple[Any, ...] = (False,)) -> Row:
    """Return a row of a flag without a value, which has a `--no-` form."""
    return Row(name, "switch", allowed, flags)


def number(name: str, *allowed: int, flags: tuple[str, ...] = ()) -> Row:
    """Return a row of an integer, which may be written as 32k or 32K."""
    return Row(name, "number", allowed, flags)


def real(name: str, *allowed: float) -> Row:
    """Return a row of a number."""
    return Row(name, "real", allowed)


def text(name: str, *allowed: str, flags: tuple[str, ...] = ()) -> Row:
    """Return a row of a text."""
    return Row(name, "text", allowed, flags)


def texts(name: str) -> Row:
    """Return a row of one or several texts."""
    return Row(name, "list")


def config(name: str, *flags: str) -> Row:
    """Return a row of JSON, or of its keys one by one: `--name.key value`."""
    return Row(name, "json", (), flags)


def same(row: Row, sentence: str = "", convert: Callable[[Any, str], Any] | None = None) -> Row:
    """Return the row of an argument that Quire has under the same name."""
    return replace(row, does="same", sentence=sentence, convert=convert)


def renamed(row: Row, own: str, sentence: str = "", convert: Callable[[Any, str], Any] | None = None) -> Row:
    """Return the row of an argument that Quire has under another name."""
    return replace(row, does="renamed", own=own, sentence=sentence, convert=convert)


def accepted(sentence: str, *rows: Row) -> tuple[Row, ...]:
    """Return rows of arguments that have no effect."""
    return tuple(replace(row, does="accepted", sentence=sentence) for row in rows)


def refused(sentence: str, *rows: Row) -> tuple[Row, ...]:
    """Return rows of arguments that would change the engine or the server in ways that are not supported."""
    return tuple(replace(row, does="refused", sentence=sentence) for row in rows)
