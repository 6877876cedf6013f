"""One streamed answer of /v1/completions: bytes as they come in, token times and counts out. No I/O, no clock.

The client shares its machine with the server that it measures, so a chunk costs one split and one typed JSON parse.
"""

import msgspec

_MAX_EVENT_BYTES = 1 << 20  # of an event that does not end: no server that we measure sends such


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _ErrorBody(msgspec.Struct):
    message: str = ""
    type: str | None = None
    code: str | int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _ErrorBody | str | None = None


_decoder = msgspec.json.Decoder(_Chunk)


class Failure(msgspec.Struct, frozen=True):
    """Why a request has no answer: a short label to count by, and what was said."""

    label: str
    message: str = ""


class AnswerStream:
    """What came of one answer so far.

    A chunk with text, or with token ids, is an arrival, however many tokens it brings: the stream does not tell, only
    the usage at its end does. An answer of which no chunk has text (a lone byte of a character) arrives with its last.
    """

    def __init__(self) -> None:
        self.token_times_s: list[float] = []
        self.num_chunks = 0
        self.num_usage_tokens: int | None = None
        self.num_cached_tokens: int | None = None
        self.failure: Failure | None = None
        self.is_done = False
        self._tail = b""

    def feed(self, piece: bytes, now_s: float) -> None:
        """Take what was read at `now_s`. What follows an error or the end is ignored."""
        lines = (self._tail + piece).split(b"\n")
        self._tail = lines.pop()
        if len(self._tail) > _MAX_EVENT_BYTES:
            self.failure = Failure("malformed stream", f"an event of more than {_MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:") and not self.is_over:
                self._take_event(line[5:].strip(), now_s)

    @property
    def is_over(self) -> bool:
        """Whether the answer has ended, well or not."""
        return self.is_done or self.failure is not None

    def _take_event(self, event: bytes, now_s: float) -> None:
        self.num_chunks += 1
        if event == b"[DONE]":
            self._end(now_s)
            return
        try:
            chunk = _decoder.decode(event)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.failure = Failure("malformed stream", str(error))
            return
        if chunk.error is not None:
            self.failure = _failure("in the stream", chunk.error)
        if chunk.usage is not None:
            self._take_usage(chunk.usage)
        if any(choice.text or choice.token_ids for choice in chunk.choices):
            self.token_times_s.append(now_s)

    def _take_usage(self, usage: _Usage) -> None:
        self.num_usage_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self.num_cached_tokens = usage.prompt_tokens_details.cached_tokens

    def _end(self, now_s: float) -> None:
        self.is_done = True
        if not self.token_times_s:
            self.token_times_s.append(now_s)


def refusal(status: int, body: bytes) -> Failure:
    """Return the failure that an answer with another status than 200 tells of, whatever its form."""
    try:
        error = _decoder.decode(body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        error = None
    return _failure(str(status), error or body[:500].decode(errors="replace"))


def _failure(where: str, error: _ErrorBody | str) -> Failure:
    if isinstance(error, str):
        return Failure(where, error)
    reason = error.code or error.type
    return Failure(f"{where} {reason}" if reason else where, error.message)
