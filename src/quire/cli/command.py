"""Class of all commands: flags from the environment and in other names, beside the command's own, and `--help=TOPIC`.

Kubernetes and Docker set variables for a service or a link called "quire" that look like flags in the environment:
QUIRE_PORT=tcp://10.96.12.7:8000 has the name of `--port`. Such a value is ignored with a warning. Any other value that
a flag cannot have is an error that names the variable.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from quire.cli.flag_groups import VARIABLE_PREFIX, VLLM_FLAGS, variable_of
from quire.cli.help_text import help_text
from quire.core.checks import nearest
from quire.core.optional_package import ARGUMENT_NAMES, load

_ADDRESS = re.compile(r"(tcp|udp|sctp)://\S+:\d+")
_TOPIC = "help_topic"   # key of a context's `meta`
_DIGITS = re.compile(r"[0-9]{1,15}")
_MISSPELT = 0.9  # a letter too many or too few
_SERVICE_VARIABLE = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")


class Group(TyperGroup):
    """Group of commands, with flags of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 (of the click that typer brings)
        """Read the group's flags."""
        _spare_validators(self.get_params(ctx))
        return super().parse_args(ctx, args)


class Command(TyperCommand):
    """Command with flags of its own and of vLLM, typed or in the environment, but not in the variables of a service."""

    def get_help(self, ctx: Any) -> str:  # noqa: ANN401 (of the click that typer brings)
        """Return the help on the topic of `--help=TOPIC`, or the short one."""
        return help_text(ctx, ctx.meta.get(_TOPIC, ""))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 (of the click that typer brings)
        """Read the flags. BadParameter names the environment variable if the value is from there."""
        args = _without_topic(ctx, args)
        vllm_flags = ctx.meta[VLLM_FLAGS] = load(ARGUMENT_NAMES, "flags")(self.get_params(ctx), ctx.fail)
        _spare_validators(self.get_params(ctx))
        names = [param.name for param in self.params if param.name]
        warning = drop_service_variables(names, os.environ)
        for text in (warning, misspelt_variables(names, os.environ)):
            if text is not None:
                print(f"quire: warning: {text}", file=sys.stderr)  # noqa: T201
        try:
            if "--help" not in args:        # help shows defaults
                ctx.default_map = vllm_flags.defaults(os.environ)
            return super().parse_args(ctx, vllm_flags.arguments(args, os.environ))
        except typer.BadParameter as error:
            error.message += _origin(ctx, error.param)
            raise


def _spare_validators(params: Iterable[Any]) -> None:
    """Have the values of flags and arguments read by `_process_value`."""
    for param in params:
        if not isinstance(param.process_value, partial):
            param.process_value = partial(_process_value, param, param.process_value)


def _process_value(param: Any, process: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:  # noqa: ANN401 (typer's)
    """Return a flag's value as typer's `process` does, without a validator of pydantic where none is needed.

    For each flag that a command has typer makes one, also if the flag was not given: with pydantic's import 0.12 s of a
    start. A default is right as the code has it; a text is one, and digits alone are a number.
    """
    annotation = getattr(getattr(param, "type_descriptor", None), "annotation", None)  # before typer 0.26: none
    is_several = param.multiple or param.nargs != 1
    source = ctx.get_parameter_source(param.name)
    if source is not None and source.name == "DEFAULT" and not param.required and not (value is None and is_several):
        found = value
    elif is_several or not isinstance(value, str) or annotation not in (str, int, float):
        return process(ctx, value)
    elif annotation is str:
        found = value
    elif _DIGITS.fullmatch(value) and param.min is None and param.max is None:
        found = annotation(value)
    else:
        return process(ctx, value)
    return found if param.callback is None else param.callback(ctx, param, found)


def _without_topic(ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 (of the click that typer brings)
    """Return the arguments with `--help` for a `--help=TOPIC`, of which the topic is kept in the context."""
    words = args[: args.index("--")] if "--" in args else args
    topics = [word.partition("=")[2] for word in words if word.startswith("--help=")]
    if not topics:
        return args
    ctx.meta[_TOPIC] = topics[0]
    return ["--help", *args[len(words) :]]


def _origin(ctx: Any, param: Any) -> str:  # noqa: ANN401 (of the click that typer brings; there may be no parameter)
    """Return the remark that a value is from the environment, if it is."""
    name = getattr(param, "name", None)
    source = ctx.get_parameter_source(name) if name else None
    if name is None or source is None or source.name != "ENVIRONMENT":
        return ""
    variable = variable_of(name)
    return f" (the environment has {variable}={os.environ.get(variable, '')!r})"


def misspelt_variables(flags: Iterable[str], environment: Mapping[str, str]) -> str | None:
    """Return a warning of variables that are no flag's but nearly, or None if there are none.

    Others are not told: they may be those of another command's flags.
    """
    known = {variable_of(name) for name in flags}
    candidates = sorted(name for name in environment.keys() - known if name.startswith(f"{VARIABLE_PREFIX}_"))
    near = {name: nearest(name, known, _MISSPELT) for name in candidates}
    told = [f"{name} is no flag of this command{found}" for name, found in near.items() if found]
    return " ".join(told) or None


def drop_service_variables(flags: Iterable[str], environment: MutableMapping[str, str]) -> str | None:
    """Remove variables of these flags' names that hold a service's address; return a warning, or None if none does."""
    names = [name for name in map(variable_of, flags) if _ADDRESS.fullmatch(environment.get(name, ""))]
    if not names:
        return None
    values = ", ".join(f"{name}={environment.pop(name)}" for name in names)
    rest = sorted(name for name in environment if _SERVICE_VARIABLE.fullmatch(name.removeprefix(VARIABLE_PREFIX)))
    as_well = f" (as are {', '.join(rest)})" if rest else ""
    return (
        f"{values} is ignored{as_well}: Kubernetes sets it for a service called quire, and Docker for a link of that "
        f"name; set the flag on the command line or in the file of --config"
    )
