"""Class of all commands: flags from the environment and in vLLM's names, beside the command's own."""

import os
import sys
from typing import Any

import typer
from typer.core import TyperCommand

from quire.cli.flag_groups import VLLM_FLAGS
from quire.cli.service_variables import drop_service_variables
from quire_vllm.flags import VllmFlags, variable_of


class Command(TyperCommand):
    """Command with flags of its own and of vLLM, typed or in the environment, but not in the variables of a service."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 (of the click that typer brings)
        """Read the flags. BadParameter names the environment variable if the value is from there."""
        vllm_flags = ctx.meta[VLLM_FLAGS] = VllmFlags(self.get_params(ctx), ctx.fail)
        warning = drop_service_variables([param.name for param in self.params if param.name], os.environ)
        if warning is not None:
            print(f"quire: warning: {warning}", file=sys.stderr)  # noqa: T201
        try:
            if "--help" not in args:        # which shows defaults
                ctx.default_map = vllm_flags.defaults(os.environ)
            return super().parse_args(ctx, vllm_flags.arguments(args, os.environ))
        except typer.BadParameter as error:
            error.message += _origin(ctx, error.param)
            raise


def _origin(ctx: Any, param: Any) -> str:  # noqa: ANN401 (of the click that typer brings; there may be no parameter)
    """Return the remark that a value is from the environment, if it is."""
    name = getattr(param, "name", None)
    source = ctx.get_parameter_source(name) if name else None
    if name is None or source is None or source.name != "ENVIRONMENT":
        return ""
    variable = variable_of(name)
    return f" (the environment has {variable}={os.environ.get(variable, '')!r})"
