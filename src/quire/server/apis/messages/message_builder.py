"""Responses of /v1/messages: one message of blocks, or the events that build it.

Reasoning, text and calls become blocks in the order in which the output has them. White space before a block's first
word waits for that word: models write line breaks around calls, and clients send each block back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.core.outputs import CompletionOutput, RequestOutput
from quire.server.api.chat import MessageReader
from quire.server.api.generation import TokenUsage
from quire.server.api.http_responses import encode
from quire.server.api.preparation import ApiRequest
from quire.server.apis.messages.cache_control import CacheUse
from quire.server.apis.messages.messages_bodies import error_body
from quire.server.errors import NO_JSON, ApiError
from quire.server.tools.call_reader import Arguments, CallBegan, CallEnded, Content, Event, Reasoning
from quire.text.tokenizer import Tokenizer

Json = dict[str, Any]

_MESSAGE_UNITS = 4
_UNIT_CHARS = 16    # so much text, or as many tokens, is a unit of work


@dataclass(slots=True, kw_only=True)
class MessagesRequest(ApiRequest):
    """A call of /v1/messages."""

    cache: CacheUse | None = None       # the prefix that cache_control marks, if it is pinned
    manages_context: bool = False       # the body has context_management, of which no edit is applied

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of the prompt."""
        return len(self.requests[0].prompt.token_ids)


class MessageBuilder:
    """Builds the response to one call."""

    def __init__(self, request: MessagesRequest, tokenizer: Tokenizer | None) -> None:
        self.request, self.streams = request, request.stream
        self._reader: MessageReader | None = None
        if request.reading is not None:
            self._reader = MessageReader(request.reading, tokenizer, request.requests[0].prompt.token_ids)
        self._blocks: list[Json] = []                   # finished blocks, for a whole response
        self._texts: list[str] = []                     # text of the block that is open
        self._open: Json | None = None                  # the block that is open, as it starts
        self._space = ""                                # white space that waits for a word, of the kind `_space_type`
        self._space_type = ""
        self._num_blocks = 0                            # begun so far
        self._has_begun = False
        self._ending: Json = {}

    def response(self, outputs: Sequence[RequestOutput], usage: TokenUsage) -> Iterator[bytes]:
        """Yield the whole message."""
        for _ in self._events(outputs[0]):
            yield b""
        message = self._message(usage.num_cached_tokens) | {"content": self._blocks} | self._ending | self._edits()
        message["usage"]["output_tokens"] = usage.num_output_tokens
        yield encode(message)

    def first_chunk(self) -> bytes:
        """Return nothing: a stream begins with its first output, which says what was cached."""
        return b""

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[bytes]:
        """Yield the events for the new part of an output."""
        if not self._has_begun:
            self._has_begun = True
            message = self._message(output.num_cached_tokens)
            yield _frame("message_start", message=message)
        yield from self._events(output)

    def weight(self, prompt_index: int, output: RequestOutput) -> int:
        """Return the work of encoding an output."""
        return sum(_MESSAGE_UNITS + (len(piece.text) + len(piece.token_ids)) // _UNIT_CHARS for piece in output.outputs)

    def last_chunk(self, usage: TokenUsage) -> bytes:
        """Return the end of a stream."""
        written = self._usage(usage.num_cached_tokens) | {"output_tokens": usage.num_output_tokens}
        return _frame("message_delta", delta=self._ending, usage=written, **self._edits()) + _frame("message_stop")

    def error_chunk(self, error: ApiError) -> bytes:
        """Return the end of a stream that failed."""
        return b"event: error\ndata: " + encode(error_body(error)) + b"\n\n"

    def _message(self, num_cached_tokens: int) -> Json:
        return {
            "id": self.request.id, "type": "message", "role": "assistant", "model": self.request.model, "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": self._usage(num_cached_tokens),
        }  # fmt: skip

    def _edits(self) -> Json:
        """Return the field that says which edits of the context were applied, for bodies that ask for some."""
        return {"context_management": {"applied_edits": []}} if self.request.manages_context else {}

    def _usage(self, num_cached_tokens: int) -> Json:
        """Return the tokens of the prompt by what the cache did with them, and no token of output."""
        num_read, num_written = num_cached_tokens, 0
        if (cache := self.request.cache) is not None:
            num_read = cache.num_read + max(0, num_cached_tokens - cache.num_tokens)
            num_written = cache.num_tokens - cache.num_read
        return {
            "input_tokens": self.request.num_prompt_tokens - num_read - num_written,
            "cache_creation_input_tokens": num_written,
            "cache_read_input_tokens": num_read,
            "output_tokens": 0,
        }

    # --- blocks ---------------------------------------------------------------------------------------------------

    def _events(self, output: RequestOutput) -> Iterator[bytes]:
        """Yield the frames of the next part of an output, and an empty one after each slice of work."""
        for piece in output.outputs:
            is_last = piece.finish_reason is not None
            for events in self._read(piece, is_last=is_last):
                for event in events:
                    yield from self._add(event)
                yield b""
            if is_last:
                yield from self._finish(piece)

    def _read(self, piece: CompletionOutput, *, is_last: bool) -> Iterator[Sequence[Event]]:
        if self._reader is not None:
            return self._reader.events(piece, is_last=is_last)
        return iter([[Content(piece.text)]] if piece.text else [])

    def _add(self, event: Event) -> Iterator[bytes]:
        match event:
            case Content(text):
                yield from self._add_text("text", text)
            case Reasoning(text):
                if self.request.reading is not None and self.request.reading.shows_reasoning:
                    yield from self._add_text("thinking", text)
            case CallBegan(index, name):
                assert self.request.reading is not None, "only outputs that are read have calls"
                yield from self._close()
                id_ = self.request.reading.call_id(name, index)
                yield from self._begin({"type": "tool_use", "id": id_, "name": name, "input": {}})
            case Arguments(_, text):
                yield from self._grow(text)
            case CallEnded():
                return

    def _add_text(self, kind: str, text: str) -> Iterator[bytes]:
        """Add to the open block of a kind, or begin one at the first word."""
        if self._open is None or self._open["type"] != kind:
            waiting = self._space if self._space_type == kind else ""
            text = waiting + text
            if text.isspace():
                self._space, self._space_type = text, kind
                return
            yield from self._close()
            begun = {"type": kind, kind: ""}
            yield from self._begin(begun | ({"signature": ""} if kind == "thinking" else {"citations": None}))
        yield from self._grow(text)

    def _begin(self, block: Json) -> Iterator[bytes]:
        self._open, self._space, self._space_type = block, "", ""
        yield _frame("content_block_start", index=self._num_blocks, content_block=block)
        self._num_blocks += 1

    def _grow(self, text: str) -> Iterator[bytes]:
        assert self._open is not None, "a block is open"
        if not text:
            return
        if not self.request.stream:
            self._texts.append(text)
            return
        kind = self._open["type"]
        name, field = {
            "text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking"),
            "tool_use": ("input_json_delta", "partial_json"),
        }[kind]  # fmt: skip
        yield _frame("content_block_delta", index=self._num_blocks - 1, delta={"type": name, field: text})

    def _close(self) -> Iterator[bytes]:
        """End the open block; keep it for a whole response."""
        self._space, self._space_type = "", ""
        if self._open is None:
            return
        block, text, self._open, self._texts = self._open, "".join(self._texts), None, []
        if not self.request.stream:
            kind = block["type"]
            self._blocks.append(block | ({"input": _object(text)} if kind == "tool_use" else {kind: text}))
        yield _frame("content_block_stop", index=self._num_blocks - 1)

    def _finish(self, piece: CompletionOutput) -> Iterator[bytes]:
        """End the message. An output of white space alone is a block all the same."""
        if self._space and self._num_blocks == 0:
            text = self._space
            yield from self._begin({"type": "text", "text": "", "citations": None})
            yield from self._grow(text)
        yield from self._close()
        has_calls = self._reader is not None and self._reader.has_complete_calls
        is_stopped = piece.finish_reason == "stop" and isinstance(piece.stop_reason, str)
        stopped = piece.stop_reason if is_stopped else None
        reason = "max_tokens" if piece.finish_reason == "length" else "tool_use" if has_calls else "end_turn"
        if stopped is not None and reason == "end_turn":
            reason = "stop_sequence"
        self._ending = {"stop_reason": reason, "stop_sequence": stopped}


def _frame(kind: str, **fields: object) -> bytes:
    """Return a server-sent event."""
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind} | fields) + b"\n\n"


def _object(text: str) -> Json:
    """Return the arguments of a call; those of one that was cut are no JSON, and left out."""
    try:
        value = msgspec.json.decode(text or "{}")
    except NO_JSON:
        return {}
    return value if isinstance(value, dict) else {}
