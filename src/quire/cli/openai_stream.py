"""Events of an OpenAI server's stream and their JSON, for `quire chat --url` and `quire bench serve`.

Every line of data counts as an event, as all OpenAI servers write them. Names that are not read here are skipped.
"""

import msgspec
from msgspec import Struct

from quire.core.errors import EngineError

MAX_EVENT_BYTES = 1 << 20  # bound on an event that does not end; a server may not fill the memory
DONE = b"[DONE]"


class BrokenStreamError(EngineError):
    """A server sent what is no part of an OpenAI answer."""


class Delta(Struct):
    """Piece of a chat's answer."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None     # the same, under an older name


class Choice(Struct):
    """Piece of an answer in a chunk: `text` of a completion, `delta` of a chat."""

    text: str | None = None
    token_ids: list[int] | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(Struct):
    cached_tokens: int | None = None


class Usage(Struct):
    """Counts of tokens, as far as the server reports them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class ErrorBody(Struct):
    """Error in the words of the server."""

    message: str = ""
    type: str | None = None
    code: str | int | None = None


class Frame(Struct):
    """One event of a stream, or the body of a refusal."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: ErrorBody | str | None = None


_frames = msgspec.json.Decoder(Frame)
_BROKEN_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class EventDecoder:
    """Turns the bytes of a stream, cut anywhere, into the data of its events."""

    def __init__(self) -> None:
        self._tail = b""  # bytes of a line that has not ended

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of each event that `piece` ends. Raises BrokenStreamError when one grows too long."""
        lines = (self._tail + piece).split(b"\n")
        self._tail = lines.pop()
        if len(self._tail) > MAX_EVENT_BYTES:
            raise BrokenStreamError(f"the server sent an event of more than {MAX_EVENT_BYTES} bytes")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def read_frame(event: bytes) -> Frame:
    """Return what an event holds. Raises BrokenStreamError when that is no chunk of an answer."""
    try:
        return _frames.decode(event)
    except _BROKEN_JSON as error:
        raise BrokenStreamError(f"the server sent what is no OpenAI answer: {error}") from error


def error_of(frame: Frame) -> ErrorBody | None:
    """Return the error that an event carries, if it does. Some servers send no more than words."""
    return ErrorBody(frame.error) if isinstance(frame.error, str) else frame.error


def read_error(body: bytes) -> ErrorBody | None:
    """Return the error in the body of a refusal; None where it has another form."""
    try:
        return error_of(_frames.decode(body))
    except _BROKEN_JSON:
        return None


def first_model_name(body: bytes) -> str | None:
    """Return the first name of the body of /v1/models; None where there is none."""
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (*_BROKEN_JSON, LookupError, TypeError):
        return None
