"""What an OpenAI server says, as types: frames of a streamed chat completion, errors, the list of models."""

from http import HTTPStatus
from typing import TypeVar

import msgspec
from msgspec import Struct

from quire.cli.chat.back_end import ChatError, Update
from quire.core.errors import ContextLengthError, EngineError

_BROKEN_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_MAX_MESSAGE_CHARS = 1000

T = TypeVar("T")


class _Error(Struct):
    message: str = ""
    code: str | int | None = None


class _Delta(Struct):
    content: str | None = None


class _Choice(Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Frame(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None


class _Refused(Struct):
    error: _Error | str | None = None


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[_Model] = []


def read_frame(event: str) -> Update:
    """Return what one event of the stream adds to the answer; raise the error that it carries, if it does."""
    frame = _decode(event, _Frame)
    if frame.error is not None:
        raise _as_error(frame.error, "the server ended the answer with an error: ")
    choice = frame.choices[0] if frame.choices else _Choice()
    usage = frame.usage or _Usage()
    return Update(choice.delta.content or "", usage.prompt_tokens, usage.completion_tokens, choice.finish_reason)


def first_model(body: bytes) -> str | None:
    """Return the name of the first model of a list, or None if it is empty."""
    models = _decode(body, _Models).data
    return models[0].id if models else None


def refusal(status: int, reason: str | None, body: bytes) -> EngineError:
    """Return the error of a status that is not 200, with the message of the body where it has one."""
    try:
        error = msgspec.json.decode(body, type=_Refused).error
    except _BROKEN_JSON:
        error = None
    if error is None:
        return ChatError(f"the server answered {status} {reason or _phrase(status)}")
    return _as_error(error, f"the server answered {status}: ")


def _as_error(error: _Error | str, prefix: str) -> EngineError:
    error = _Error(error) if isinstance(error, str) else error
    text = prefix + (" ".join(error.message.split())[:_MAX_MESSAGE_CHARS] or f"code {error.code}")
    return ContextLengthError(text) if error.code == "context_length_exceeded" else ChatError(text)


def _phrase(status: int) -> str:
    return HTTPStatus(status).phrase if status in list(HTTPStatus) else ""


def _decode(text: str | bytes, shape: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=shape)
    except _BROKEN_JSON as error:
        raise ChatError(f"the server sent what is no OpenAI answer: {error}") from error
