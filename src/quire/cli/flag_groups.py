"""Groups of flags that several commands share, each written once, as a dataclass.

A command takes a group as one parameter; `with_flag_groups` shows typer the group's fields instead. A field is an
`Annotated` type with a `flag` or a `typer.Argument`, and its default is the flag's default. Where a dataclass of
another floor is a group, the text of a flag stands in its field's metadata.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

# Names may be written with `_` or `-`; a flag's name in the environment is QUIRE_ and its long name.
GROUP_SETTINGS: dict[str, Any] = {"token_normalize_func": lambda name: name.replace("_", "-")}
COMMAND_SETTINGS = GROUP_SETTINGS | {"auto_envvar_prefix": "QUIRE"}


def flag(help_text: str, *names: str, panel: str | None = None, **settings: Any) -> Any:  # noqa: ANN401 (typer's types)
    """Return a typer option, shown in the help under `panel`. Names are for a switch that has no `--no-` form."""
    return typer.Option(*names, help=help_text, rich_help_panel=panel, show_envvar=False, **settings)


def with_flag_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with each parameter that is annotated with a dataclass replaced by the dataclass's fields."""
    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    groups = {name: hints[name] for name in signature.parameters if is_dataclass(hints[name])}

    @functools.wraps(command)
    def flat(**values: Any) -> None:  # noqa: ANN401 (the options of any command)
        built = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
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
    for field in fields(hint):
        annotation = field_hints[field.name]
        if "flag" in field.metadata:
            annotation = _described(field, annotation, getattr(hint, "__name__", None))
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=annotation
        )


def _described(field: Field[Any], kind: object, panel: str | None) -> object:
    """Return the type of a flag that its field describes; a size may be given in text, which its dataclass reads."""
    if field.name.endswith("_bytes"):
        return Annotated[str, flag(field.metadata["flag"], panel=panel, metavar="SIZE")]
    return Annotated[kind, flag(field.metadata["flag"], panel=panel)]


def _default(field: Field[Any]) -> object:
    """Return a field's default, or the mark for none: a required option."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is MISSING else field.default
