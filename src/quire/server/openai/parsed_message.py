"""One message of a chat from the events in its text: pieces of a stream, or the whole."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from quire.core.outputs import CompletionOutput, FinishReason
from quire.server.api.output_events import Arguments, CallBegan, CallEnded, Content, Event, Reasoning
from quire.server.api.output_formats import OutputReading
from quire.text.detokenizer import incremental_detokenizer
from quire.text.tokenizer import Tokenizer

Json = dict[str, Any]

SLICE_CHARS = 1 << 12   # read at once
SLICE_TOKENS = 1 << 10  # counted at once


class ParsedMessage:
    """Reads the text of one choice, and counts the tokens of its reasoning."""

    def __init__(self, reading: OutputReading, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int]) -> None:
        self._reading = reading
        self._parser = reading.new_parser()
        self._num_open = self._num_calls = 0
        self._has_reasoning = False
        self._counter: _ReasoningCounter | None = None
        if reading.reasoning_end is not None and tokenizer is not None:
            self._counter = _ReasoningCounter(reading.reasoning_end, tokenizer, prompt_token_ids)

    @property
    def num_reasoning_tokens(self) -> int:
        """Count the tokens so far up to the end of the reasoning, its markers included; 0 without reasoning."""
        return self._counter.num_tokens if self._counter is not None and self._has_reasoning else 0

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """Return the finish reason of the message: a complete output with tool calls ends for them."""
        return "tool_calls" if reason == "stop" and self._num_calls and not self._num_open else reason

    def deltas(self, piece: CompletionOutput, *, is_last: bool) -> Iterator[Json]:
        """Yield what the next piece of the output adds to the message, in slices of work; empty if nothing."""
        if self._counter is not None:
            for start in range(0, len(piece.token_ids), SLICE_TOKENS):
                if start:
                    yield {}
                self._counter.append(piece.token_ids[start : start + SLICE_TOKENS])
        text = piece.text
        for start in range(0, max(1, len(text)), SLICE_CHARS):
            events = self._parser.feed(text[start : start + SLICE_CHARS])
            if is_last and start + SLICE_CHARS >= len(text):
                events = [*events, *self._parser.finish()]
            yield self._delta(events)

    def _delta(self, events: Iterable[Event]) -> Json:
        content, reasoning = list[str](), list[str]()
        calls: dict[int, Json] = {}
        for event in events:
            match event:
                case Content(text):
                    content.append(text)
                case Reasoning(text):
                    self._has_reasoning = True
                    reasoning.append(text)
                case CallBegan(index, name):
                    self._num_calls += 1
                    self._num_open += 1
                    id_ = self._reading.call_id(name, index)
                    function = {"name": name, "arguments": ""}
                    calls[index] = {"index": index, "id": id_, "type": "function", "function": function}
                case Arguments(index, text):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
                case CallEnded():
                    self._num_open -= 1
        delta: Json = {"content": "".join(content)} if content else {}
        if reasoning and self._reading.shows_reasoning:
            delta |= reasoning_fields("".join(reasoning))
        if calls:
            delta["tool_calls"] = list(calls.values())
        return delta


class _ReasoningCounter:
    """Counts tokens up to the one that completes the marker at the end of the reasoning."""

    def __init__(self, end: str, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self.num_tokens = 0
        self._end, self._tail, self._is_over = end, "", False
        self._detokenizer = incremental_detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=False)

    def append(self, token_ids: Sequence[int]) -> None:
        """Count the next tokens of the output."""
        if self._is_over:
            return
        for token_id in token_ids:
            self.num_tokens += 1
            self._tail += self._detokenizer.append((token_id,))
            if self._end in self._tail:
                self._is_over = True
                return
            self._tail = self._tail[-len(self._end) :]


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
