"""Adapter names: the LoRA adapters that clients may name as models, given at start or while the server runs."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from quire.core.checks import shown
from quire.core.errors import ConfigError
from quire.core.lora import MAX_ADAPTERS, MAX_NAME_CHARS, Adapter

MODULE_KEYS = {"name", "path", "base_model_name"}


class AdapterModule(NamedTuple):
    """An adapter of --lora-modules."""

    name: str
    path: str
    base_model_name: str | None = None


class ServedAdapter(NamedTuple):
    """An adapter that has been read. `parent`: the name of its model."""

    name: str
    adapter: Adapter
    parent: str
    created: int                # seconds since 1970


def parse_modules(texts: Sequence[str]) -> tuple[AdapterModule, ...]:
    """Return the adapters of texts such as sql=adapters/sql, or {"name": ..., "path": ..., "base_model_name": ...}."""
    modules = [_json_module(text) if text.lstrip().startswith("{") else _pair(text) for text in texts]
    names = [module.name for module in modules]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"lora_modules has the name {twice!r} twice")
    if len(modules) > MAX_ADAPTERS:
        raise ConfigError(f"lora_modules must be at most {MAX_ADAPTERS}, got {len(modules)}")
    return tuple(modules)


def _pair(text: str) -> AdapterModule:
    name, _, path = text.partition("=")
    return _checked(AdapterModule(name, path), text)


def _json_module(text: str) -> AdapterModule:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"lora_modules must be NAME=PATH or a JSON object, got {text[:200]!r}") from error
    if unknown := sorted(given.keys() - MODULE_KEYS):
        raise ConfigError(f"lora_modules has the key {unknown[0]!r}; it takes {', '.join(sorted(MODULE_KEYS))}")
    return _checked(AdapterModule(given.get("name"), given.get("path"), given.get("base_model_name")), text)


def _checked(module: AdapterModule, text: str) -> AdapterModule:
    name, path, base = module
    are_texts = all(isinstance(each, str) and each for each in (name, path)) and isinstance(base, str | None)
    if not are_texts or not name.isprintable() or len(name) > MAX_NAME_CHARS:
        raise ConfigError(
            f"lora_modules must be NAME=PATH or a JSON object with name and path, names of at most {MAX_NAME_CHARS} "
            f"characters, got {text[:200]!r}"
        )
    return module


def path_below(root: str, path: str) -> Path:
    """Return the folder `path` below `root`, links resolved. Raises ValueError for one outside of it."""
    top = Path(root).resolve()
    folder = (top / path).resolve()
    if folder == top or not folder.is_relative_to(top) or not folder.is_dir():
        raise ValueError(f"lora_path {shown(path)} is no folder below lora_root")
    return folder


class AdapterNames:
    """The adapters by name. `model_names` are taken."""

    def __init__(self, model_names: Sequence[str]) -> None:
        self._model_names = tuple(model_names)
        self._served: dict[str, ServedAdapter] = {}

    def find(self, name: str) -> ServedAdapter | None:
        """Return an adapter, None for an unknown name."""
        return self._served.get(name)

    @property
    def all(self) -> list[ServedAdapter]:
        """All adapters in the order of their names' arrival."""
        return list(self._served.values())

    def reason_against(self, name: str) -> str | None:
        """Return why a name cannot be added; None if it can."""
        if name in self._served or name in self._model_names:
            return f"an adapter {shown(name)} has already been loaded; unload it first, or use another name"
        if len(self._served) >= MAX_ADAPTERS:
            return f"there are {len(self._served)} adapters, which is the most; unload one first"
        return None

    def add(self, name: str, adapter: Adapter, parent: str | None = None) -> None:
        """Add an adapter, or replace that of its name."""
        named = adapter._replace(name=name)
        self._served[name] = ServedAdapter(name, named, parent or self._model_names[0], int(time.time()))

    def remove(self, name: str) -> bool:
        """Remove an adapter; return False for an unknown name. Requests that were sent keep it."""
        return self._served.pop(name, None) is not None
