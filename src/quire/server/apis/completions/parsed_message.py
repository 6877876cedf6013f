"""One message of a chat from the events in its text: pieces of a stream, or the whole."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from quire.core.deltas import FinishReason
from quire.core.outputs import CompletionOutput
from quire.server.api.message_reader import MessageReader
from quire.server.tools.output_events import Arguments, CallBegan, Content, Event, Reasoning
from quire.server.tools.served_formats import OutputReading
from quire.text.tokenizer import Tokenizer

Json = dict[str, Any]


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
