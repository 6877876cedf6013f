"""`quire`: the commands, and the one place that turns errors into exit codes.

0: done. 1: an error with one line on stderr. 2: wrong usage. 130: interrupted. A traceback means a fault of Quire.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import quire
from quire.cli.bench.commands import bench
from quire.cli.chat.command import chat
from quire.cli.command import Command
from quire.cli.deploy import deploy
from quire.cli.flag_groups import COMMAND_SETTINGS, GROUP_SETTINGS
from quire.cli.generate import generate
from quire.cli.paper.command import paper
from quire.cli.plan import plan
from quire.cli.serve import serve
from quire.cli.simulate import simulate
from quire.core.errors import EngineError
from quire.core.optional_package import absent_package

try:
    from quire.cli.run_batch.command import run_batch
except ModuleNotFoundError as error:
    if absent_package(error, "quire.cli.run_batch") is None:
        raise
    run_batch = None  # type: ignore[assignment]  # optional: without it there is no such command

app = typer.Typer(
    name="quire",
    help="An inference and serving engine that manages the KV cache like virtual memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=GROUP_SETTINGS,
)
for command in (serve, generate, chat, plan, simulate, deploy, paper):
    app.command(cls=Command, context_settings=COMMAND_SETTINGS)(command)
app.add_typer(bench)
if run_batch is not None:
    app.command("run-batch", cls=Command, context_settings=COMMAND_SETTINGS)(run_batch)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"quire {quire.__version__}")  # noqa: T201
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="print the version and exit", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Hold the options before the command's name."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; always ends in SystemExit."""
    try:
        app(args=arguments)
    except BrokenPipeError:  # the reader went away: `quire generate | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter fails again at its exit
        sys.exit(1)
    except (EngineError, OSError) as error:
        print(f"quire: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(1)
