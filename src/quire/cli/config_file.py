"""`--config FILE.yaml`: the flags of a command, by their long names, from a file.

Precedence, first wins: command line, environment (`QUIRE_` and the option's name), file, default. A value from the
file is read as if it had been typed, so all four are checked in the same place.
"""

from pathlib import Path
from typing import Any

import typer
import yaml

_NOT_FROM_FILE = frozenset({"config", "help"})


def load_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults of the options that are read next (typer callback of `--config`)."""
    if path is not None:
        known = {param.name for param in context.command.params if param.name} - _NOT_FROM_FILE
        context.default_map = _known_values(path, _read(path), known)
    return path


def _read(path: Path) -> dict[str, Any]:
    """Return the file's mapping, keys as they stand there. An empty file is an empty mapping."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise typer.BadParameter(f"{path} must hold options as 'name: value' lines, not a {type(content).__name__}")
    return content


def _known_values(path: Path, content: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """Return the values by parameter name. Raises BadParameter for an unknown or repeated name or a nested value."""
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            options = ", ".join(sorted(option.replace("_", "-") for option in known))
            raise typer.BadParameter(f"{path} has an unknown option {key!r}; this command knows {options}")
        if name in values:
            raise typer.BadParameter(f"{path} names {name.replace('_', '-')!r} twice")
        values[name] = _as_typed(path, name, value)
    return {name: value for name, value in values.items() if value is not None}


def _as_typed(path: Path, name: str, value: object) -> str | list[str] | None:
    """Return a value as it would stand on the command line; a list is an option given several times."""
    if value is None:
        return None
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return [str(item) for item in value]
    if isinstance(value, str | int | float):
        return str(value)
    raise typer.BadParameter(f"{path} gives {name.replace('_', '-')!r} a {type(value).__name__}, expected one value")
