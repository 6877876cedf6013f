"""Back end of a chat: an OpenAI server, streamed chat completions over HTTP.

Each answer has a connection of its own, and stopping the answer closes it, at which the server stops too.
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlsplit

from quire.cli import openai_stream
from quire.cli.chat.chat_history import ChatError, Update
from quire.core.errors import ContextLengthError, EngineError
from quire.text.conversation import Message

_MAX_BODY_BYTES = 1 << 20  # bound on an answer that is no stream
_MAX_MESSAGE_CHARS = 1000
_CONNECT_S = 10.0
_SILENCE_S = 600.0  # a request may wait in the server's queue for a while
_IN_PATHS = "/%:@!$&'()*+,;=~"


class RemoteBackEnd:
    """A model of an OpenAI server. `sampling` goes into each request as it is; the rest the server decides."""

    def __init__(
        self, url: str, api_key: str | None, model_name: str | None = None, sampling: Mapping[str, Any] | None = None
    ) -> None:
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ChatError("--api-key must be printable ASCII")
        self._base = base_url(url)
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._model_name = model_name or self._first_model()
        self._sampling = dict(sampling or {})

    @property
    def greeting(self) -> str:
        """The model and the server, for the user."""
        return f"Chatting with {self._model_name} at {self._base}."

    def answer(self, messages: Sequence[Message], on_update: Callable[[Update], None]) -> None:
        """Ask the server and pass on what it streams. EngineError for what it refuses, and a stream that breaks off."""
        body = self._sampling | {
            "model": self._model_name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        has_ended, decoder = False, openai_stream.EventDecoder()
        with closing(self._request("POST", "/chat/completions", json.dumps(body))) as pieces:
            for piece in pieces:
                for event in decoder.feed(piece):
                    if event == openai_stream.DONE:
                        return
                    update = _update(event)
                    has_ended = has_ended or update.finish_reason is not None
                    on_update(update)
        if not has_ended:
            raise ChatError(f"{self._base} closed the stream before the answer ended")

    def _first_model(self) -> str:
        name = openai_stream.first_model_name(b"".join(self._request("GET", "/models")))
        if name is None:
            raise ChatError(f"{self._base} lists no model; give --model-name")
        return name

    def _request(self, method: str, path: str, body: str | None = None) -> Generator[bytes, None, None]:
        """Yield the pieces of a stream, or another body as one. Raises EngineError for any failure."""
        parts = urlsplit(self._base)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        with closing(kind(parts.hostname or "", parts.port, timeout=_CONNECT_S)) as connection:
            try:
                connection.connect()
            except OSError as error:
                raise ChatError(f"cannot connect to {self._base}: {error.strerror or error}") from error
            connection.sock.settimeout(_SILENCE_S)
            headers = self._headers | {"Content-Type": "application/json"}
            try:
                connection.request(method, quote(parts.path + path, safe=_IN_PATHS), body, headers)
                response = connection.getresponse()
                if response.status != HTTPStatus.OK:
                    raise _refusal(response)
                if method == "GET":
                    yield response.read(_MAX_BODY_BYTES)
                elif (kind_of_answer := response.headers.get_content_type()) != "text/event-stream":
                    raise ChatError(f"{self._base} sent {kind_of_answer} instead of a stream of events")
                while piece := response.read1():
                    yield piece
            except (OSError, HTTPException) as error:
                said = " ".join(str(error).split()) or type(error).__name__
                raise ChatError(f"the connection to {self._base} failed: {said}") from error


def base_url(url: str) -> str:
    """Return the address under which the routes lie, which ends in /v1. ChatError when it is none."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or "@" in url or "?" in url or "#" in url:
        raise ChatError(f"--url must look like http://HOST:PORT, with or without /v1, got {url!r}")
    return url.rstrip("/").removesuffix("/v1") + "/v1"


def _update(event: bytes) -> Update:
    """Return what one event of the stream adds to the answer; raise the error that it carries, if it does."""
    frame = openai_stream.read_frame(event)
    if (error := openai_stream.error_of(frame)) is not None:
        raise _as_error(error, "the server ended the answer with an error: ")
    choice, usage = frame.choices[0] if frame.choices else openai_stream.Choice(), frame.usage or openai_stream.Usage()
    delta = choice.delta or openai_stream.Delta()
    reasoning = delta.reasoning or delta.reasoning_content or ""
    counts = usage.prompt_tokens, usage.completion_tokens
    return Update(delta.content or "", *counts, choice.finish_reason, reasoning)


def _refusal(response: HTTPResponse) -> EngineError:
    """Return the error of a status that is not 200, with the message of the body where it has one."""
    error = openai_stream.read_error(response.read(_MAX_BODY_BYTES))
    if error is not None:
        return _as_error(error, f"the server answered {response.status}: ")
    known = HTTPStatus(response.status).phrase if response.status in list(HTTPStatus) else ""
    return ChatError(f"the server answered {response.status} {response.reason or known}")


def _as_error(error: openai_stream.ErrorBody, prefix: str) -> EngineError:
    text = prefix + (" ".join(error.message.split())[:_MAX_MESSAGE_CHARS] or f"code {error.code}")
    return ContextLengthError(text) if error.code == "context_length_exceeded" else ChatError(text)
