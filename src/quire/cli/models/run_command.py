"""`quire run`: a model by its name, fetched where it is not there, and a chat with it."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.chat.chat_command import ChatSamplingFlags, local_back_end
from quire.cli.chat.chat_history import ChatHistory
from quire.cli.chat.session import ChatSession, Screen
from quire.cli.flag_groups import flag, with_config_file, with_flag_groups
from quire.cli.models.pull_command import fetch
from quire.core.hub import whole_in_cache
from quire.engine.options import EngineOptions
from quire.model.resolve import locate


@with_config_file
@with_flag_groups
def run(
    context: typer.Context,
    engine: EngineOptions,
    sampling: ChatSamplingFlags,
    system: Annotated[str | None, flag("the system message")] = None,
) -> None:
    """Fetch a model where it is not on this machine, and talk to it in the terminal."""
    sampling.params()  # a value out of range is found before anything is fetched
    name = engine.model
    if name is not None:
        located = locate(name)
        here = located if isinstance(located, Path) else whole_in_cache(located, engine.revision)
        engine = replace(engine, model=str(here or fetch(name, engine.revision)))
    with local_back_end(context, engine, sampling, name) as back_end:
        ChatSession(back_end, Screen(), ChatHistory(system)).run()
