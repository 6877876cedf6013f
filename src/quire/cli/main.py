"""`quire`: the commands, and the one place that turns errors into exit codes.

0: done. 1: an error with one line on stderr. 2: wrong usage, or something is not installed. 130: interrupted. A
traceback means a fault of Quire.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import quire
from quire.cli.command import Command, Group
from quire.cli.flag_groups import COMMAND_SETTINGS, GROUP_SETTINGS
from quire.core.errors import EngineError, NotInstalledError
from quire.core.optional_package import COMMANDS, entry_points

# What each command does, for a list of them: a command itself takes half a second to load.
SUMMARIES = {
    "serve": "Serve a model over HTTP, as OpenAI's API does; or, as a node other than 0, compute for such a server.",
    "generate": "Complete one prompt, or a JSONL file of prompts.",
    "chat": "Talk to a model in the terminal, or to a server.",
    "run": "Fetch a model where it is not on this machine, and talk to it in the terminal.",
    "pull": "Fetch a model of a hub, after a check that it is served and fits; a broken transfer is resumed.",
    "list": "List the models that quire pull has fetched, and the aliases of models.toml.",
    "show": "Show what a model on this machine is: family, parameters, sizes, and what it takes in memory.",
    "rm": "Remove a fetched model from the hub's cache: all its revisions or one, or one GGUF file.",
    "top": "Show what a server does: tokens and requests per second, waiting times, the KV cache, its engines.",
    "replay": "Make the decisions of a recorded engine again, and compare each plan with that of the record.",
    "report": "Write a file for the report of a bug: the machine, versions, settings, and a server's state.",
    "plan": "Say what fits before anything is loaded: weights, KV blocks, requests by length, and what binds.",
    "simulate": "Serve on a virtual clock: throughput, latencies, goodput, KV use, cost, and what would bind.",
    "pack": "Pack a model's weights into a file, from which engines on CPUs start sooner.",
    "session": "Make, export and import saved sessions: the keys and values of prompts, for servers to restore.",
    "deploy": (
        "Deploy a model on a Ray cluster: replicas that scale, are upgraded one by one, and replaced when they die."
    ),
    "route": "Route completions to servers for prompts, then with their KV blocks to servers for decoding.",
    "paper": "Make figures of the PagedAttention paper (Kwon et al. 2023) on Quire's scheduler and cache.",
    "run-batch": "Answer a file of requests, in the form of OpenAI's batches.",
    "bench": "Measure throughput, latency, a server, the control plane, and this machine for simulations.",
}


# Names of commands in other programs, and what does the same here.
MEANT = {
    "version": "quire --version", "ps": "quire top, of a server, or quire list, of models", "ls": "quire list",
    "download": "quire pull", "remove": "quire rm", "start": "quire serve", "benchmark": "quire bench",
}  # fmt: skip


def make_app(arguments: Sequence[str] | None = None) -> typer.Typer:
    """Return the command line for arguments: of the commands, the one that they begin with is loaded. None: all are."""
    app = typer.Typer(
        name="quire",
        cls=Group,
        help="An inference and serving engine that manages the KV cache like virtual memory.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings=GROUP_SETTINGS,
        callback=_root,
    )
    commands = entry_points(COMMANDS)
    for name in commands:
        if arguments is not None and name in SUMMARIES and name not in arguments[:1]:
            app.command(name, help=SUMMARIES[name])(_list)
            continue
        made = commands[name].load()
        if isinstance(made, typer.Typer):
            app.add_typer(made)
        else:
            app.command(name, cls=Command, context_settings=COMMAND_SETTINGS)(made)
    return app


def _list() -> None:
    """Stand for a command in the list of all."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"quire {quire.__version__}")  # noqa: T201
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="print the version and exit", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Hold the options before the command's name."""


def main(arguments: Sequence[str] | None = None, app: typer.Typer | None = None) -> None:
    """Run the command line, by default that of `make_app`; always ends in SystemExit."""
    try:
        given = sys.argv[1:] if arguments is None else arguments
        if given and given[0] in MEANT:
            print(f"quire: no command {given[0]!r}; did you mean {MEANT[given[0]]}?", file=sys.stderr)  # noqa: T201
            sys.exit(2)
        (app or make_app(given))(args=given)
    except BrokenPipeError:  # the reader went away: `quire generate | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter fails again at its exit
        sys.exit(1)
    except (EngineError, OSError) as error:
        told = str(error)
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            told = f"{error.filename}: {error.strerror}"
        print(f"quire: {told}", file=sys.stderr)  # noqa: T201
        sys.exit(2 if isinstance(error, NotInstalledError) else 1)
