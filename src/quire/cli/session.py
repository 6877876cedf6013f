"""`quire session warm`, `export` and `import`: saved sessions of a directory, without a server."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.command import Command
from quire.cli.flag_groups import COMMAND_SETTINGS, STANDARD_STREAM, flag, with_config_file, with_flag_groups
from quire.cli.model_flags import OfflineOptions, load
from quire.core.errors import ConfigError
from quire.core.options import parse_bytes
from quire.engine.requests.saved_sessions import SavedSessions, check_name

session = typer.Typer(
    name="session",
    help="Make, export and import saved sessions: the keys and values of prompts, for servers to restore.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_Name = Annotated[str, flag("name of the saved session", metavar="NAME")]
_Directory = Annotated[Path, flag("folder of the engine's disk tier", metavar="DIR")]
_Key = Annotated[
    str | None, flag("API key of the client that the session belongs to; without it, of clients without keys",
                     metavar="KEY")
]  # fmt: skip


@with_config_file
@with_flag_groups
def warm(
    engine: OfflineOptions,
    prompt: Annotated[Path, flag("text of the session; - is standard input", metavar="FILE|-")],
    name: _Name,
) -> None:
    """Compute a prompt and save it as a session in --kv-disk-dir, as for an image of a container."""
    if engine.kv_disk_dir is None:
        raise ConfigError("quire session warm needs kv_disk_dir: the session is saved there")
    check_name(name)
    text = sys.stdin.read() if prompt == STANDARD_STREAM else prompt.read_text(encoding="utf-8")
    with load(engine) as llm:
        made = llm.create_session(text)
        made.save(name)
        print(f"{name}: {made.num_tokens} tokens")  # noqa: T201


def export(
    name: _Name, kv_disk_dir: _Directory,
    output: Annotated[Path, flag("file to write", "--output", "-o", metavar="FILE")],
    api_key: _Key = None,
) -> None:  # fmt: skip
    """Write a saved session into a file."""
    saved = SavedSessions(kv_disk_dir)
    num_bytes = saved.export(saved.owner_of(_one(api_key)), name, output)
    print(f"{output}: {num_bytes} bytes")  # noqa: T201


def import_(
    file: Annotated[Path, typer.Argument(help="what `quire session export` has written", show_default=False)],
    name: _Name, kv_disk_dir: _Directory, api_key: _Key = None,
    max_size: Annotated[str, flag("largest session that is read", metavar="SIZE")] = "16GiB",
) -> None:  # fmt: skip
    """Read a session from a file into the directory of an engine, in the place of the one that has the name.

    Import trusted files alone: keys and values are compared with digests of the same file, not with the tokens.
    """
    saved = SavedSessions(kv_disk_dir)
    read = saved.import_file(saved.owner_of(_one(api_key)), name, file, parse_bytes(max_size, "max_size"))
    print(f"{name}: {read.num_tokens} tokens of {read.model}")  # noqa: T201


def _one(api_key: str | None) -> str | None:
    """Return an API key. ConfigError for several: QUIRE_API_KEY may have those of a server."""
    if api_key is not None and len(api_key.split()) != 1:
        raise ConfigError("api_key must be one key: that of the client that the session belongs to")
    return api_key


session.command("warm", cls=Command, context_settings=COMMAND_SETTINGS)(warm)
session.command("export", cls=Command, context_settings=COMMAND_SETTINGS)(export)
session.command("import", cls=Command, context_settings=COMMAND_SETTINGS)(import_)
