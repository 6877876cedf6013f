"""The command `quire chat`: which model answers, and how."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import typer

from quire.cli.chat.back_end import BackEnd
from quire.cli.chat.conversation import Conversation
from quire.cli.chat.local import LocalBackEnd
from quire.cli.chat.screen import open_screen
from quire.cli.chat.session import ChatSession
from quire.cli.engine_flags import EngineFlags
from quire.cli.flag_groups import flag, with_flag_groups
from quire.cli.sampling_flags import AnswerFlags

_PANEL = "Sampling"


@dataclass(frozen=True, slots=True)
class ChatSamplingFlags(AnswerFlags):
    """How answers are drawn: a little below temperature 1, where small models write best, and to their own end."""

    temperature: Annotated[
        float, flag("0 is greedy", panel=_PANEL, show_default="0.7; the server's own with --url")
    ] = 0.7
    max_tokens: Annotated[
        int | None, flag("most tokens of an answer", panel=_PANEL, show_default="as many as fit")
    ] = None


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """A server to talk to, in place of a model in this process."""

    url: Annotated[str | None, flag("an OpenAI server, as http://HOST:PORT", panel="Server")] = None
    model_name: Annotated[
        str | None, flag("which of its models", panel="Server", show_default="the first that it lists")
    ] = None
    api_key: Annotated[str | None, flag("for the server; QUIRE_API_KEY in the environment", panel="Server")] = None


@with_flag_groups
def chat(
    context: typer.Context,
    engine: EngineFlags,
    sampling: ChatSamplingFlags,
    server: ServerFlags,
    system: Annotated[str | None, flag("the system message")] = None,
) -> None:
    """Talk to a model in the terminal, or to a server."""
    with _back_end(context, engine, sampling, server) as back_end:
        ChatSession(back_end, open_screen(), Conversation(system)).run()


@contextmanager
def _back_end(
    context: typer.Context, engine: EngineFlags, sampling: ChatSamplingFlags, server: ServerFlags
) -> Iterator[BackEnd]:
    params = sampling.params()  # a value out of range is found before anything is loaded
    if server.url is None:
        _refuse_typed(context, (field.name for field in fields(ServerFlags)), "needs --url")
        if _source(context, "max_num_seqs") == "DEFAULT":
            engine = replace(engine, max_num_seqs=1)  # which also keeps the KV cache to one conversation
        with engine.load() as llm:
            yield LocalBackEnd(llm, params, engine.model)
        return
    from quire.cli.chat.remote import RemoteBackEnd  # noqa: PLC0415 (loads aiohttp, which a local model does not need)

    _refuse_typed(context, (field.name for field in fields(EngineFlags)), "is for a local model, not for --url")
    yield RemoteBackEnd(server.url, server.api_key, server.model_name, _given(context, sampling))


def _given(context: typer.Context, sampling: ChatSamplingFlags) -> dict[str, Any]:
    """Return the parameters that somebody set, by their names in a request. The server decides the others."""
    names = [field.name for field in fields(sampling) if _source(context, field.name) != "DEFAULT"]
    return {"seed" if name == "sampling_seed" else name: getattr(sampling, name) for name in names}


def _refuse_typed(context: typer.Context, names: Iterable[str], reason: str) -> None:
    """Raise for an option on the command line that would change nothing. In the environment or a file it may stand."""
    for name in names:
        if name != "config" and _source(context, name) == "COMMANDLINE":
            shown = name.upper() if name == "model" else "--" + name.replace("_", "-")
            raise typer.BadParameter(f"{shown} {reason}")


def _source(context: typer.Context, name: str) -> str:
    source = context.get_parameter_source(name)
    assert source is not None, f"{name} is no parameter of this command"
    return source.name
