"""`quire chat`: choice of the back end, and sampling of its answers."""

from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from mimetypes import guess_type
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from quire.cli.chat.chat_back_ends import LocalBackEnd, RemoteBackEnd
from quire.cli.chat.chat_history import ChatBackEnd, ChatHistory
from quire.cli.chat.session import ChatSession, Screen
from quire.cli.flag_groups import flag, flag_field, with_config_file, with_flag_groups
from quire.cli.model_flags import AnswerFlags, load, model_defaults
from quire.core.options import declared_options
from quire.engine.options import EngineOptions

IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
_PANEL, _REMOTE = "Sampling", "Remote server"


@dataclass(frozen=True, slots=True)
class ChatSamplingFlags(AnswerFlags):
    """Sampling of answers: a little below temperature 1, where small models write best, and to their own end."""

    fallbacks: ClassVar[Mapping[str, Any]] = {"temperature": 0.7, "max_tokens": None}

    temperature: float | None = flag_field(
        None, "0 is greedy", panel=_PANEL, show_default="the model's, else 0.7; the server's own with --url"
    )
    max_tokens: int | None = flag_field(None, "most tokens of an answer", panel=_PANEL, show_default="as many as fit")


@dataclass(frozen=True, slots=True)
class RemoteFlags:
    """A server to talk to, in place of a model in this process."""

    url: str | None = flag_field(None, "an OpenAI server, as http://HOST:PORT", panel=_REMOTE)
    model_name: str | None = flag_field(
        None, "which of its models", panel=_REMOTE, show_default="the first that it lists"
    )
    api_key: str | None = flag_field(None, "for the server; QUIRE_API_KEY in the environment", panel=_REMOTE)


@with_config_file
@with_flag_groups
def chat(
    context: typer.Context,
    engine: EngineOptions,
    sampling: ChatSamplingFlags,
    server: RemoteFlags,
    system: Annotated[str | None, flag("the system message")] = None,
    image: Annotated[list[Path] | None, flag("an image that the first question is about (repeatable)")] = None,
) -> None:
    """Talk to a model in the terminal, or to a server."""
    images = tuple(image_url(path) for path in image or ())
    with _back_end(context, engine, sampling, server) as back_end:
        ChatSession(back_end, Screen(), ChatHistory(system, images=images)).run()


def image_url(path: Path) -> str:
    """Return the file of an image as a data: URL. BadParameter for one that cannot be read, or of another type."""
    media_type = guess_type(path)[0]
    if media_type not in IMAGE_TYPES:
        raise typer.BadParameter(f"--image must be a file of PNG, JPEG, WebP or GIF, got {path}")
    try:
        return f"data:{media_type};base64,{b64encode(path.read_bytes()).decode()}"
    except OSError as error:
        raise typer.BadParameter(f"--image {path}: {error.strerror or error}") from error


@contextmanager
def _back_end(
    context: typer.Context, engine: EngineOptions, sampling: ChatSamplingFlags, server: RemoteFlags
) -> Iterator[ChatBackEnd]:
    sampling.params()  # a value out of range is found before anything is loaded
    if server.url is None:
        _refuse_typed(context, (field.name for field in fields(RemoteFlags)), "needs --url")
        with local_back_end(context, engine, sampling, engine.model) as back_end:
            yield back_end
        return
    _refuse_typed(context, _engine_flags(), "is for a local model, not for --url")
    yield RemoteBackEnd(server.url, server.api_key, server.model_name, _given(context, sampling))


@contextmanager
def local_back_end(
    context: typer.Context, engine: EngineOptions, sampling: ChatSamplingFlags, name: str | None
) -> Iterator[ChatBackEnd]:
    """Load a model for one conversation; `name`: what the user calls it."""
    if _source(context, "max_num_seqs") == "DEFAULT":
        engine = replace(engine, max_num_seqs=1)  # it also keeps the KV cache to one conversation
    with load(engine) as llm:
        yield LocalBackEnd(llm, sampling.params(model_defaults(engine)), name)


def _engine_flags() -> list[str]:
    return [each.name for each in declared_options(EngineOptions) if each.option.kind != "none"]


def _given(context: typer.Context, sampling: ChatSamplingFlags) -> dict[str, Any]:
    """Return the parameters that the user set, by their names in a request. The server decides the rest."""
    names = [field.name for field in fields(sampling) if _source(context, field.name) != "DEFAULT"]
    return {"seed" if name == "sampling_seed" else name: getattr(sampling, name) for name in names}


def _refuse_typed(context: typer.Context, names: Iterable[str], reason: str) -> None:
    """Raise for an option on the command line that would change nothing. Environment and file may have it."""
    for name in names:
        if _source(context, name) == "COMMANDLINE":
            shown = name.upper() if name == "model" else "--" + name.replace("_", "-")
            raise typer.BadParameter(f"{shown} {reason}")


def _source(context: typer.Context, name: str) -> str:
    source = context.get_parameter_source(name)
    assert source is not None, f"{name} is no parameter of this command"
    return source.name
