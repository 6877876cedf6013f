"""Groups of flags that several commands share, each written once, as a dataclass.

A command takes a group as one parameter; `with_flag_groups` shows typer the group's fields instead, each a `flag_field`
or of an `Annotated` type, as parameters are. Where a dataclass of another floor is a group, the text of a flag stands
in its field's metadata.

`--config FILE.yaml` gives the flags of a command by their long names. Precedence, first wins: command line, environment
(`QUIRE_` and the option's name), file, default. A value from the file is read as if it had been typed, so all four are
checked in the same place.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
import yaml

# Names may be written with `_` or `-`; a flag's name in the environment is QUIRE_ and its long name.
GROUP_SETTINGS: dict[str, Any] = {"token_normalize_func": lambda name: name.replace("_", "-")}
COMMAND_SETTINGS = GROUP_SETTINGS | {"auto_envvar_prefix": "QUIRE"}
STANDARD_STREAM = Path("-")
_NOT_FROM_FILE = frozenset({"config", "help"})


def flag(help_text: str, *names: str, panel: str | None = None, **settings: Any) -> Any:  # noqa: ANN401 (typer's types)
    """Return a typer option, shown in the help under `panel`. Names are for a switch that has no `--no-` form."""
    return typer.Option(*names, help=help_text, rich_help_panel=panel, show_envvar=False, **settings)


def flag_field(default: object, help_text: str, *names: str, **settings: Any) -> Any:  # noqa: ANN401 (stands for it)
    """Return a field of a group: a `flag` and its default. A list is that of a flag that may be given several times."""
    metadata = {"flag": flag(help_text, *names, **settings)}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_output(path: Path | None) -> Path | None:
    """Return the path of a file that is written at the end, if it can be (typer callback). BadParameter if not.

    Pipes and devices are not tried: who reads one would take that for all there is.
    """
    if path is None or path == STANDARD_STREAM:
        return path
    is_there = path.exists()
    if is_there and not (path.is_file() or path.is_dir()):
        return path
    try:
        path.open("ab").close()
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error.strerror}") from error
    if not is_there:
        path.unlink()
    return path


JSON = flag("write everything there as well", metavar="FILE", callback=check_output)


def with_flag_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with each parameter that is annotated with a dataclass replaced by the dataclass's fields."""
    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    groups = {name: hints[name] for name in signature.parameters if is_dataclass(hints[name])}

    @functools.wraps(command)
    def flat(**values: Any) -> None:  # noqa: ANN401 (the options of any command)
        built = {
            name: group(**{each.name: values.pop(each.name) for each in fields(group)})
            for name, group in groups.items()
        }
        command(**built, **values)

    parameters = [flag for parameter in signature.parameters.values() for flag in _flatten(parameter, hints)]
    flat.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {}  # typer would look names up here that only the signature has
    return flat


def _flatten(parameter: inspect.Parameter, hints: dict[str, Any]) -> Iterator[inspect.Parameter]:
    """Yield the parameter itself, or one parameter for each field of its dataclass."""
    hint = hints[parameter.name]
    if not is_dataclass(hint):
        yield parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY)
        return
    field_hints = get_type_hints(hint, include_extras=True)
    for each in fields(hint):
        annotation, described = field_hints[each.name], each.metadata.get("flag")
        if isinstance(described, str):
            is_size = each.name.endswith("_bytes")  # may be given in text, which its dataclass reads
            described = flag(described, panel=hints[parameter.name].__name__, metavar="SIZE" if is_size else None)
            annotation = str if is_size else annotation
        default = each.default if each.default_factory is MISSING else each.default_factory()
        yield inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is MISSING else default,
            annotation=annotation if described is None else Annotated[annotation, described],
        )


def load_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults of the options that are read next (typer callback of `--config`).

    Raises BadParameter for a file that is none, an unknown or repeated name, or a nested value.
    """
    if path is None:
        return None
    known = {param.name for param in context.command.params if param.name} - _NOT_FROM_FILE
    values: dict[str, Any] = {}
    for key, value in _read(path).items():
        name = str(key).replace("-", "_")
        if name not in known:
            options = ", ".join(sorted(option.replace("_", "-") for option in known))
            raise typer.BadParameter(f"{path} has an unknown option {key!r}; this command knows {options}")
        if name in values:
            raise typer.BadParameter(f"{path} names {name.replace('_', '-')!r} twice")
        values[name] = _as_typed(path, name, value)
    context.default_map = {name: value for name, value in values.items() if value is not None}
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


def _as_typed(path: Path, name: str, value: object) -> str | list[str] | None:
    """Return a value as it would stand on the command line; a list is an option given several times."""
    if value is None:
        return None
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return [str(item) for item in value]
    if isinstance(value, str | int | float):
        return str(value)
    raise typer.BadParameter(f"{path} gives {name.replace('_', '-')!r} a {type(value).__name__}, expected one value")
