"""Back ends of a chat: a model in this process, or an OpenAI server, streamed chat completions over HTTP.

Each answer of a server has a connection of its own, and stopping the answer closes it, at which the server stops too.
"""

import json
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from types import FrameType
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote, urlsplit

from quire.cli import openai_stream
from quire.cli.chat.chat_history import ChatError, Update
from quire.core.errors import ContextLengthError, EngineError
from quire.core.outputs import RequestOutput
from quire.core.sampling_params import SamplingParams
from quire.text.conversation import Message

if TYPE_CHECKING:
    from quire.llm import LLM


_MAX_BODY_BYTES = 1 << 20  # bound on an answer that is no stream
_MAX_MESSAGE_CHARS = 1000
_CONNECT_S = 10.0
_SILENCE_S = 600.0  # a request may wait in the server's queue for a while
_IN_PATHS = "/%:@!$&'()*+,;=~"
CONTINUATION_MAX_TOKENS = 128  # a model that was never trained to end its turn would write until nothing fits


class LocalBackEnd:
    """An `LLM`. Without a chat template the model continues one text that the user and it write in turn."""

    def __init__(self, llm: "LLM", params: SamplingParams, name: str | None) -> None:
        if llm.tokenizer is None:
            raise ChatError(f"{name} has no tokenizer, which a chat needs; LLM.generate takes token ids")
        self._llm = llm
        self._tokenizer = llm.tokenizer
        self._name = name
        self._is_chat_model = self._tokenizer.chat_template is not None
        self._params = params
        if not self._is_chat_model and params.max_tokens is None:
            self._params = replace(params, max_tokens=max(CONTINUATION_MAX_TOKENS, params.min_tokens))

    @property
    def greeting(self) -> str:
        """The kind of model, for the user."""
        if self._name is None:
            return (
                "The bundled demo model is a toy that imitates Python's standard library. It knows two kinds of "
                'question: "Write a function parse_header." and "What does read_file do?"'
            )
        if self._is_chat_model:
            return f"Chatting with {self._name}."
        return (
            f"{self._name} has no chat template: it continues what you write, up to {self._params.max_tokens} tokens "
            "at a time (--max-tokens), instead of answering."
        )

    def answer(self, messages: Sequence[Message], on_update: Callable[[Update], None]) -> None:
        """Run the model to the answer's end. Ctrl-C stops it at the end of a step, a second one at once."""
        if self._is_chat_model:
            outputs = self._llm.stream_chat(messages, self._params)
        else:
            outputs = self._llm.stream(continued_text(messages), self._params)
        num_written = 0
        with postponed_interrupt() as interrupted, closing(cast(Generator[RequestOutput, None, None], outputs)):
            for output in outputs:
                [completion] = output.outputs
                on_update(
                    Update(
                        completion.text[num_written:],
                        num_prompt_tokens=len(output.prompt_token_ids),
                        num_tokens=len(completion.token_ids),
                        finish_reason=completion.finish_reason,
                    )
                )
                num_written = len(completion.text)
                if interrupted.is_set():
                    raise KeyboardInterrupt


def continued_text(messages: Sequence[Message]) -> str:
    """Return one text: a user's words begin a new line, an answer continues where they end. ChatError for images."""
    text = ""
    for message in messages:
        if not isinstance(message["content"], str):
            raise ChatError("a model without a chat template reads no images")
        if message["role"] == "user" and text and not text.endswith("\n"):
            text += "\n"
        text += message["content"]
    return text


@contextmanager
def postponed_interrupt() -> Iterator[threading.Event]:
    """Let the first Ctrl-C set an event, because amid a step it would leave a request half updated."""
    before = signal.getsignal(signal.SIGINT)
    interrupted = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


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
