"""Responses of /v1/chat/completions: a message from the events in its text, in pieces of a stream or whole."""

from collections.abc import Iterable, Iterator, Sequence

from quire.core.deltas import FinishReason
from quire.core.outputs import CompletionOutput
from quire.server.api.chat import MessageReader
from quire.server.api.generation import TokenUsage
from quire.server.api.http_responses import JsonStream, encode_streamed
from quire.server.api.token_logprobs import TokenNames
from quire.server.apis.completions.openai_logprobs import WholeChatLogprobs, chat_logprobs, prompt_logprobs
from quire.server.apis.completions.openai_response import (
    ROLE,
    UNUSED_OF_CHOICES,
    UNUSED_OF_CHUNK_CHOICES,
    Json,
    OpenAIRequest,
    OpenAIResponseBuilder,
)
from quire.server.tools.call_reader import Arguments, CallBegan, Content, Event, Reasoning
from quire.server.tools.served_formats import OutputReading
from quire.text.tokenizer import Tokenizer

# Fields of every message. vLLM 0.10 called the reasoning reasoning_content.
_NULL_FIELDS: Json = dict.fromkeys((
    "refusal", "annotations", "audio", "function_call", "reasoning", "reasoning_content",
))  # fmt: skip


class ParsedMessage:
    """Writes the fields of a message from the events in the text of one choice."""

    def __init__(self, reading: OutputReading, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int]) -> None:
        self._reading = reading
        self._reader = MessageReader(reading, tokenizer, prompt_token_ids)

    @property
    def num_reasoning_tokens(self) -> int:
        """Count the tokens of the reasoning so far."""
        return self._reader.num_reasoning_tokens

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """Return the finish reason of the message: a complete output with tool calls ends for them."""
        return "tool_calls" if reason == "stop" and self._reader.has_complete_calls else reason

    def deltas(self, piece: CompletionOutput, *, is_last: bool) -> Iterator[Json]:
        """Yield what the next piece of the output adds to the message, in slices of work; empty if nothing."""
        return map(self._delta, self._reader.events(piece, is_last=is_last))

    def _delta(self, events: Iterable[Event]) -> Json:
        content, reasoning = list[str](), list[str]()
        calls: dict[int, Json] = {}
        for event in events:
            match event:
                case Content(text):
                    content.append(text)
                case Reasoning(text):
                    reasoning.append(text)
                case CallBegan(index, name):
                    id_ = self._reading.call_id(name, index)
                    function = {"name": name, "arguments": ""}
                    calls[index] = {"index": index, "id": id_, "type": "function", "function": function}
                case Arguments(index, text):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
        delta: Json = {"content": "".join(content)} if content else {}
        if reasoning and self._reading.shows_reasoning:
            delta |= reasoning_fields("".join(reasoning))
        if calls:
            delta["tool_calls"] = list(calls.values())
        return delta


def reasoning_fields(text: str | None) -> Json:
    """Return the fields of reasoning: vLLM's name, and that of DeepSeek and others."""
    return {"reasoning": text, "reasoning_content": text}


def whole_message(deltas: Iterable[Json]) -> Iterator[Json]:
    """Yield the fields of a whole message last, and an empty object after each slice of work before."""
    content, reasoning = list[str](), list[str]()
    calls: dict[int, Json] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        content.append(delta.get("content", ""))
        reasoning.append(delta.get("reasoning", ""))
        for call in delta.get("tool_calls", ()):
            index = call["index"]
            calls.setdefault(index, call)
            arguments.setdefault(index, []).append(call["function"]["arguments"])
        yield {}
    message: Json = {"content": "".join(content)}
    if any(reasoning):
        message |= reasoning_fields("".join(reasoning))
    if calls or any(reasoning):
        message["content"] = message["content"] or None
    if calls:
        message["tool_calls"] = [
            {"id": call["id"], "type": "function",
             "function": {"name": call["function"]["name"], "arguments": "".join(arguments[index])}}
            for index, call in calls.items()
        ]  # fmt: skip
    yield message


class ChatResponseBuilder(OpenAIResponseBuilder):
    """Builder for n messages.

    A stream begins with a chunk for each message that has the role, and no token: openai's helper for streams relies on
    their order, and counts logprobs of a message's first chunk twice.
    """

    OBJECT = "chat.completion"
    CHUNK_OBJECT = "chat.completion.chunk"

    def __init__(self, request: OpenAIRequest, tokenizer: Tokenizer | None) -> None:
        super().__init__(request)
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer, as_ids=request.writes_token_ids)
        self._echo = request.message_echo
        self._parsed: dict[int, ParsedMessage] = {}  # messages that are read for tool calls and reasoning, by index

    def _choice_pieces(self, prompt_index: int, output: CompletionOutput) -> Iterable[bytes]:
        if self.request.reading is None:
            return super()._choice_pieces(prompt_index, output)
        return self._parsed_choice(self.request.reading, output)

    def _choice(self, prompt_index: int, output: CompletionOutput) -> Json:
        return self._whole_choice(output, {"content": output.text}, output.finish_reason)

    def _parsed_choice(self, reading: OutputReading, output: CompletionOutput) -> Iterator[bytes]:
        """Yield the JSON of a choice, and an empty piece after each slice of reading its text."""
        parsed, message = self._parsed_message(reading, output), Json()
        for message in whole_message(parsed.deltas(output, is_last=True)):
            if not message:
                yield b""
        yield from encode_streamed(self._whole_choice(output, message, parsed.finish_reason(output.finish_reason)))

    def _whole_choice(self, output: CompletionOutput, message: Json, finish_reason: str | None) -> Json:
        if self._echo:
            message["content"] = self._echo + (message["content"] or "")
        return {
            "index": output.index,
            "message": {"role": ROLE, **_NULL_FIELDS, **message},
            "logprobs": self._logprobs(output),
            "finish_reason": finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": self._token_ids(output),
            **UNUSED_OF_CHOICES,
        }

    def _chunk_choices(self, prompt_index: int, piece: CompletionOutput) -> Iterable[Json]:
        if self.request.reading is not None:
            return self._parsed_choices(self.request.reading, piece)
        if not self._is_shown(piece):
            return ()
        delta = {"content": piece.text} if piece.text else {}
        return (self._last_chunk_choice(piece, delta, piece.finish_reason),)

    def _first_choices(self) -> Iterator[Json]:
        delta = {"role": ROLE, "content": self._echo}
        return (_chunk(index, delta) for index in range(self.request.checked.params.n))

    def _has_text_chunks(self, index: int) -> bool:
        return self.request.reading is None

    def _parsed_choices(self, reading: OutputReading, piece: CompletionOutput) -> Iterator[Json]:
        """Yield the choices of a piece that is read for tool calls and reasoning, a choice for each slice of text."""
        parsed, is_last = self._parsed_message(reading, piece), piece.finish_reason is not None
        shown: Json = {}
        for delta in parsed.deltas(piece, is_last=is_last):
            if shown:
                yield _chunk(piece.index, shown)
            shown = delta
        if is_last and "tool_calls" in shown:
            yield _chunk(piece.index, shown)  # openai's stream helper ends a call by a later chunk than its first
            shown = {}
        if shown or is_last or (piece.token_ids and self.request.shows_tokens):
            yield self._last_chunk_choice(piece, shown, parsed.finish_reason(piece.finish_reason))

    def _last_chunk_choice(self, piece: CompletionOutput, delta: Json, finish_reason: str | None) -> Json:
        """Return the last choice of a piece, with what belongs to all of it."""
        choice = _chunk(piece.index, delta)
        choice |= {
            "logprobs": self._logprobs(piece), "finish_reason": finish_reason, "token_ids": self._token_ids(piece)
        }
        if piece.finish_reason is not None:
            choice |= {"stop_reason": piece.stop_reason, **UNUSED_OF_CHUNK_CHOICES}
        return choice

    def _token_ids(self, output: CompletionOutput) -> list[int] | None:
        return output.token_ids if self.request.returns_token_ids else None

    def _parsed_message(self, reading: OutputReading, piece: CompletionOutput) -> ParsedMessage:
        parsed = self._parsed.get(piece.index)
        if parsed is None:
            prompt = self.request.requests[0].prompt
            parsed = self._parsed[piece.index] = ParsedMessage(reading, self._tokenizer, prompt.token_ids)
        return parsed

    def _logprobs(self, piece: CompletionOutput) -> JsonStream | WholeChatLogprobs | None:
        if piece.packed_logprobs is None:
            return None
        params = self.request.checked.params
        num_top = None if params.logprob_token_ids else params.logprobs or 0
        return chat_logprobs(self._names, piece.packed_logprobs, num_top)

    def _usage(self, usage: TokenUsage) -> Json:
        written = super()._usage(usage)
        if self.request.reading is not None and self.request.reading.reasoning_end is not None:
            num_tokens = sum(parsed.num_reasoning_tokens for parsed in self._parsed.values())
            written["completion_tokens_details"] = {"reasoning_tokens": num_tokens}
        return written

    def _prompt_fields(self) -> Json:
        fields: Json = {"prompt_token_ids": None, "prompt_text": None}
        if self.request.returns_prompt_text:
            fields["prompt_text"] = self.request.requests[0].prompt.text
        if not self.streams:
            fields["prompt_logprobs"] = None
        if self.request.returns_token_ids:
            fields["prompt_token_ids"] = self.request.requests[0].prompt.token_ids.tolist()
        if self.request.returns_prompt_logprobs:
            table = self._prompt_logprobs[0]
            fields["prompt_logprobs"] = None if table is None else prompt_logprobs(self._names, table)
        return fields | self._scores_of_prompt(0)


def _chunk(index: int, delta: Json) -> Json:
    """Return a piece of a message."""
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": None}
