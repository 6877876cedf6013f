"""Table of arguments, and the translation of an argument of vLLM to options of Quire.

An argument is given to an engine or to a server, which has options of its own. It sets one of these, or has no effect,
which is told in one sentence, or is refused by name.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from quire.core.checks import nearest
from quire.core.errors import ConfigError
from quire_vllm.argument_rows import ENGINE_ROWS, OLDER_ROWS, SERVER_ROWS
from quire_vllm.values import Row, parsed

log = logging.getLogger("quire.vllm_arguments")

ROWS: Mapping[str, Row] = {row.name: row for row in (*ENGINE_ROWS, *SERVER_ROWS, *OLDER_ROWS)}
_OF_SERVERS = "it is for servers"
_MAX_SHOWN = 100        # characters of a value in an error


class Meaning(NamedTuple):
    """An argument in Quire's terms: options by name, and the remark that it has no effect, if it has none."""

    options: Mapping[str, Any]
    remark: str = ""


def meaning(row: Row, value: object, shown: str, options: Collection[str]) -> Meaning:
    """Return what an argument with this value means where there are these options; `shown` is its name in texts.

    Raises ConfigError for a value of the wrong type, and for an argument that is not supported.
    """
    own = row.name if row.name in options else row.own
    if own in options:
        if row.spread is not None and value is not None:
            return _spread(row, parsed(row, value, shown), shown)
        if row.convert is not None and value is not None:
            value = row.convert(value, shown)
        return Meaning({} if value is None else {own: value})
    if row.does in {"same", "renamed"}:
        return Meaning({}, f"{shown} has no effect: {_OF_SERVERS}")
    given = parsed(row, value, shown)
    if row.does == "refused" and not is_neutral(row, given):
        told = "" if row.takes in {"switch", "optional text"} else f" {_short(given)}"
        raise ConfigError(f"{shown}{told} is not supported: {row.sentence}")
    return Meaning({}, f"{shown} has no effect: {row.sentence}")


def _spread(row: Row, given: object, shown: str) -> Meaning:
    """Return the options that a value sets, and the remark that the rest of it has no effect, if there is a rest."""
    assert row.spread is not None
    taken = row.spread(given, shown)
    if taken and not (isinstance(given, Mapping) and len(given) > len(taken)):
        return Meaning(taken)
    beyond = f" beyond {', '.join(taken)}" if taken else ""
    return Meaning(taken, f"{shown} has no effect{beyond}: {row.sentence}")


def is_neutral(row: Row, value: object) -> bool:
    """Return whether a value of a refused argument asks for nothing beyond the default."""
    if value is None or (hasattr(value, "__len__") and len(value) == 0):
        return True
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in row.allowed)


def _short(value: object) -> str:
    told = repr(value)
    return told if len(told) <= _MAX_SHOWN else told[:_MAX_SHOWN] + "..."


def engine_settings(given: Mapping[str, Any], options: Collection[str]) -> dict[str, Any]:
    """Return the settings of an engine with the options named, from keywords in the names of Quire and of vLLM.

    Logs arguments without effect. TypeError for a name that neither has, with the nearest one. Raises ConfigError as
    `meaning` does, and if two names of one option are given with different values; objects are one if no key of theirs
    differs.
    """
    settings: dict[str, Any] = {}
    for name, value in given.items():
        row = ROWS.get(name)
        if name not in options and (row is None or not row.is_engine):
            near = nearest(name, {*options, *(row.name for row in ROWS.values() if row.is_engine)})
            raise TypeError(f"LLM() got an unexpected keyword argument {name!r}{near}")
        told = Meaning({name: value}) if row is None or not row.is_engine else meaning(row, value, name, options)
        if told.remark:
            log.info("%s", told.remark)
        for option in settings.keys() & told.options.keys():
            if not _agree(settings[option], told.options[option]):
                raise ConfigError(f"{name} is another name of {option}; give one of them")
        settings |= {option: _joined(settings.get(option), new) for option, new in told.options.items()}
    return settings


def _agree(earlier: object, new: object) -> bool:
    """Return whether two values of one option can both hold: they are equal, or objects with no key that differs."""
    if isinstance(earlier, Mapping) and isinstance(new, Mapping):
        return all(earlier[key] == new[key] for key in earlier.keys() & new.keys())
    return earlier == new


def _joined(earlier: object, new: object) -> object:
    """Return one value of two that agree."""
    return {**earlier, **new} if isinstance(earlier, Mapping) and isinstance(new, Mapping) else new
