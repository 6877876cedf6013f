"""Groups of flags that several commands share, each written once, as a dataclass.

A command takes a group as one parameter; `with_flag_groups` shows typer the group's fields instead, each with an
`Option` or of an `Annotated` type, as parameters are. `EngineOptions` and `ServerOptions` are groups, too.

`--config FILE.yaml` gives the flags of a command by their long names. Precedence, first wins: command line, environment
(`QUIRE_` and the option's name), file, default. A value from the file is read as if it had been typed, so all four are
checked in the same place.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from quire.core.checks import nearest
from quire.core.options import MS, SIZE, Declared, declared_options, option

# Names may be written with `_` or `-`; a flag's name in the environment is QUIRE_ and its long name.
GROUP_SETTINGS: dict[str, Any] = {
    "token_normalize_func": lambda name: name.replace("_", "-"),
    "help_option_names": ["--help", "-h"],
}
VARIABLE_PREFIX = "QUIRE"
COMMAND_SETTINGS = GROUP_SETTINGS | {"auto_envvar_prefix": VARIABLE_PREFIX}
STANDARD_STREAM = Path("-")
SEVERAL = " ..."                # end of the metavar of a flag that may have several values behind it
VLLM_FLAGS = "vllm_flags"       # key of a context's `meta`: the translation of names in its command's files
_NOT_FROM_FILE = frozenset({"config", "help"})


def variable_of(flag: str) -> str:
    """Return the name of a flag's environment variable."""
    return f"{VARIABLE_PREFIX}_{flag.replace('-', '_').upper()}"


def flag(help_text: str, *names: str, panel: str | None = None, **settings: Any) -> Any:  # noqa: ANN401 (typer's types)
    """Return a typer option, shown in the help under `panel`. Names are for a switch that has no `--no-` form."""
    return typer.Option(*names, help=help_text, rich_help_panel=panel, show_envvar=False, **settings)


def flag_field(
    default: object, help_text: str, *, panel: str | None = None, row: str = "", metavar: str | None = None,
    show_default: str | None = None, **settings: object,
) -> Any:  # noqa: ANN401 (as `option`)  # fmt: skip
    """Return a field of a group of flags that only the command line has; `settings` are typer's."""
    return option(
        default, help_text, panel=panel, row=row, metavar=metavar, shown_default=show_default,
        settings=tuple(settings.items()),
    )  # fmt: skip


def check_output(path: Path | None) -> Path | None:
    """Return the path of a file that is written at the end, if it can be (typer callback). BadParameter if not.

    Pipes and devices are not tried: a reader would take that for the whole output.
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
        built = {name: _build(group, values) for name, group in groups.items()}
        command(**built, **values)

    parameters = [each for parameter in signature.parameters.values() for each in _flatten(parameter, hints)]
    flat.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {}  # typer would look names up here that only the signature has
    return flat


def with_config_file(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with `--config FILE`, the values of which become the defaults of its flags."""

    @functools.wraps(command)
    def configured(config: Path | None = None, **values: object) -> None:
        command(**values)

    parameter = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_CONFIG)
    signature = inspect.signature(command)
    parameters = [parameter, *signature.parameters.values()]
    configured.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return configured


def _build(group: type[Any], values: dict[str, Any]) -> object:
    """Return a group made from its flags' values, which are removed from `values`."""
    without_flag = {each.name for each in declared_options(group) if each.option.kind == "none"}
    given = {each.name: values.pop(each.name) for each in fields(group) if each.name not in without_flag}
    for each in declared_options(group):
        if get_origin(each.hint) is tuple:
            given[each.name] = (each.option.parse or tuple)(given[each.name])
    return group(**given)


def _flatten(parameter: inspect.Parameter, hints: dict[str, Any]) -> Iterator[inspect.Parameter]:
    """Yield the parameter itself, or one parameter for each field of its dataclass that has a flag.

    Flags under the headings that the dataclass itself uses precede those under a base's.
    """
    hint = hints[parameter.name]
    if not is_dataclass(hint):
        yield parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY)
        return
    assert isinstance(hint, type)
    declared = {each.name: each for each in declared_options(hint)}
    own = inspect.get_annotations(hint)  # without those of its bases
    own_panels = {each.option.panel for name, each in declared.items() if name in own}
    field_hints = get_type_hints(hint, include_extras=True)
    for each in sorted(fields(hint), key=lambda each: _panel(declared.get(each.name)) not in own_panels):
        if each.name not in declared:
            yield _parameter(each.name, each.default, field_hints[each.name])
        elif declared[each.name].option.kind != "none":
            yield _parameter_of(declared[each.name])


def _panel(declared: Declared | None) -> str | None:
    return None if declared is None else declared.option.panel


def _parameter_of(declared: Declared) -> inspect.Parameter:
    """Return the parameter of an option, in types that typer knows."""
    made, hint, default = declared.option, declared.hint, declared.default
    settings = dict(made.settings)
    if made.shown_default is not None:
        settings["show_default"] = made.shown_default
    if made.metavar is not None:
        settings["metavar"] = made.metavar
    if made.kind == "argument":
        return _parameter(
            declared.name, default, Annotated[hint, typer.Argument(help=made.help, show_envvar=False, **settings)]
        )
    long = "--" + declared.name.replace("_", "-")
    names = [long] if default is False else []  # no `--no-` form for what is off
    names = names if made.short is None else [long, made.short]
    if get_origin(hint) is tuple:
        hint, default = list[str], list(default)
    elif made.metavar in (SIZE, MS) and {int, float} & {hint, *get_args(hint)}:
        hint = str | None if NoneType in get_args(hint) else str
    default = default if made.flag_default is None else made.flag_default
    return _parameter(
        declared.name, default, Annotated[hint, flag(made.help, *names, panel=made.panel, **settings)]
    )


def _parameter(name: str, default: object, annotation: object) -> inspect.Parameter:
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def load_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults of the options that are read next (typer callback of `--config`).

    Raises BadParameter for a file that is none, an unknown or repeated name, or a nested value.
    """
    if path is None:
        return None
    known = {param.name: param for param in context.command.params if param.name and param.name not in _NOT_FROM_FILE}
    vllm_flags = context.meta.get(VLLM_FLAGS)
    values: dict[str, Any] = {}
    for key, given in _read(path).items():
        name = str(key).replace("-", "_")
        named = {name: given} if vllm_flags is None or name in _NOT_FROM_FILE else vllm_flags.options_of(name, given)
        for name, value in named.items():
            if name not in known:
                options = [option.replace("_", "-") for option in known]
                told = nearest(name.replace("_", "-"), options) or f"; this command knows {', '.join(sorted(options))}"
                raise typer.BadParameter(f"{path} has an unknown option {key!r}{told}")
            if name in values:
                raise typer.BadParameter(f"{path} names {name.replace('_', '-')!r} twice")
            typed = _as_typed(path, name, value)
            is_repeatable = getattr(known[name], "multiple", False)
            values[name] = [typed] if is_repeatable and isinstance(typed, str) else typed
    given_values = {name: value for name, value in values.items() if value is not None}
    context.default_map = {**(context.default_map or {}), **given_values}
    return path


def _read(path: Path) -> dict[str, Any]:
    """Return the file's mapping with its keys unchanged. An empty file is an empty mapping."""
    import yaml  # noqa: PLC0415 (for the start without a file)

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
    """Return a value as the command line would have it; a list is an option given several times."""
    if value is None:
        return None
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return [str(item) for item in value]
    if isinstance(value, str | int | float):
        return str(value)
    raise typer.BadParameter(f"{path} gives {name.replace('_', '-')!r} a {type(value).__name__}, expected one value")


_CONFIG = Annotated[
    Path | None,
    flag(
        "flags by name from a YAML file; before it come QUIRE_NAME in the environment and the command line",
        is_eager=True, callback=load_config, exists=True, dir_okay=False, metavar="FILE",
    ),
]  # fmt: skip
