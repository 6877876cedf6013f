"""Reader of config.json of an untrusted folder: every value is checked as it is read."""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from quire.core.errors import ModelError

CONFIG_FILE = "config.json"
MAX_SIZE = 2**24               # vocabularies and widths: far past any real model, far from any overflow
MAX_LAYERS = 4096
MIN_NUMBER, MAX_NUMBER = 1e-30, 1e30  # epsilons, factors and thetas: what float32 can divide by
MAX_POSITIONS = 2**24  # float32, in which angles are computed, holds every integer up to here
MAX_HEAD_DIM = 2**16
MAX_NAMES, MAX_NAME_CHARACTERS = 2**14, 512  # limits of a list of modules
LAYER_TYPES = "sliding_attention", "full_attention"

T = TypeVar("T")


class ConfigReader:
    """Typed access to a config: a missing key and null both mean the default; no default means required.

    Every method raises ModelError that names the source, the key, the value and what was expected.
    """

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        self._values = values
        self._source = source

    def error(self, message: str) -> ModelError:
        """Return an error that names this config's file; the caller raises it."""
        return ModelError(f"{self._source}: {message}")

    def nested(self, name: str, values: Mapping[str, object]) -> "ConfigReader":
        """Return a reader of a part of this config."""
        return ConfigReader(values, f"{self._source}: {name}")

    def has(self, key: str) -> bool:
        """Return whether the key is present and not null."""
        return self._values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Return whether the key is present and null, for the few options where that is not the default."""
        return key in self._values and self._values[key] is None

    def raw(self, key: str) -> object:
        """The value as written, or None."""
        return self._values.get(key)

    def with_default(self, key: str, default: object) -> "ConfigReader":
        """Return a reader that finds `default` where the key is missing or null."""
        return self if self.has(key) else ConfigReader({**self._values, key: default}, self._source)

    def replaced(self, **values: object) -> "ConfigReader":
        """Return a reader that finds these values."""
        return ConfigReader({**self._values, **values}, self._source)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return a list of `count` numbers in [MIN_NUMBER, MAX_NUMBER]."""
        value = self.raw(key)
        if not isinstance(value, list) or len(value) != count:
            raise self.error(f"{key} must be a list of {count} numbers, got {_short(value)}")
        return tuple(self.nested(key, {str(i): each}).number(str(i)) for i, each in enumerate(value))

    def size(self, key: str, default: int | None = None, *, least: int = 1, limit: int = MAX_SIZE) -> int:
        """Return an integer in [least, limit]."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= limit:
            raise self.error(f"{key} must be an integer from {least} to {limit}, got {_short(value)}")
        return value

    def nullable_size(self, key: str, default: int) -> int | None:
        """Return a size; the default only where the key is missing, None where it is null."""
        return None if self.is_null(key) else self.size(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number in [MIN_NUMBER, MAX_NUMBER]."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not MIN_NUMBER <= value <= MAX_NUMBER:
            raise self.error(f"{key} must be a number from {MIN_NUMBER} to {MAX_NUMBER}, got {_short(value)}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, got {_short(value)}")
        return value

    def choice(self, key: str, choices: Mapping[str, T], default: str | None = None) -> T:
        """Return the entry of `choices` for the string."""
        value = self._get(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self.error(f"{key} must be one of {', '.join(choices)}, got {_short(value)}")
        return choices[value]

    def nullable_number(self, key: str, default: float) -> float:
        """Return a number; the default only where the key is missing, 0 where it is null."""
        return 0.0 if self.is_null(key) else self.number(key, default)

    def flags(self, key: str, count: int) -> list[bool] | None:
        """Return a list of `count` flags, written as true and false or 1 and 0; None when missing."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count or any(item not in (0, 1) for item in value):
            raise self.error(f"{key} must be a list of {count} times 0 or 1, got {_short(value)}")
        return [bool(item) for item in value]

    def indices(self, key: str, count: int) -> frozenset[int]:
        """Return a list of integers from 0 to `count` - 1 as a set; empty when missing."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < count for item in value):
            raise self.error(f"{key} must be a list of integers from 0 to {count - 1}, got {_short(value)}")
        return frozenset(value)

    def layer_types(self, count: int, *, windowed: int = 0, default: Sequence[str] | None = None) -> Sequence[str]:
        """Return `layer_types`, one of LAYER_TYPES for each of `count` layers.

        If missing, `default`, or else a pattern: `windowed` layers with a window, then one without.
        """
        found = self.strings("layer_types", LAYER_TYPES)
        if found and len(found) != count:
            raise self.error(f"layer_types has {len(found)} entries for {count} layers")
        pattern = [LAYER_TYPES[0] if (index + 1) % (windowed + 1) else LAYER_TYPES[1] for index in range(count)]
        return found or default or pattern

    def strings(self, key: str, choices: Collection[str]) -> list[str]:
        """Return a list of strings, all of them among `choices`; empty when missing."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) and item in choices for item in value):
            raise self.error(f"{key} must be a list of {' or '.join(choices)}, got {_short(value)}")
        return value

    def names(self, key: str) -> list[str]:
        """Return a list of names; empty when missing."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(f"{key} must be a list of names, got {_short(value)}")
        if len(value) > MAX_NAMES:
            raise self.error(f"{key} has {len(value)} names, at most {MAX_NAMES} are read")
        for name in value:
            if len(name) > MAX_NAME_CHARACTERS:
                raise self.error(f"{key}: {_short(name)} has more than {MAX_NAME_CHARACTERS} characters")
        return value

    def divided(self, key: str, parts: int) -> int:
        """Return the size of each of `parts` equal parts of a size."""
        size = self.size(key)
        if size % parts:
            raise self.error(f"{key} = {size} does not divide into {parts} equal parts")
        return size // parts

    def section(self, key: str) -> dict[str, object]:
        """Return a nested object; empty when missing."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self.error(f"{key} must be an object, got {_short(value)}")
        return value

    def sections(self, key: str) -> dict[str, "ConfigReader"]:
        """Return readers of the objects in an object, by name; empty when missing."""
        found = self.section(key)
        self.nested(key, {"keys": list(found)}).names("keys")
        inner = self.nested(key, found)
        return {name: inner.nested(f"{name:.80}", inner.section(name)) for name in found}

    def reject(self, key: str, *harmless: object, why: str) -> None:
        """Refuse any value of `key` but null and the harmless ones; `why` is the reason in the error."""
        value = self._values.get(key)
        if value is not None and value not in harmless:
            raise self.error(f"{key} = {_short(value)} is not supported yet: {why}")

    def allow_only(self, *keys: str) -> None:
        """Refuse a key that is none of these, unless its value is null, false or empty."""
        for key, value in self._values.items():
            if value and key not in keys:
                raise self.error(f"unknown option {_short(key)} = {_short(value)}; known are {', '.join(keys)}")

    def _get(self, key: str, default: object) -> object:
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(f"{key} is missing")
        return value


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "an integer of 30 digits or more"
    return text if len(text) <= 80 else text[:77] + "..."
