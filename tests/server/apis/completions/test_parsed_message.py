"""Messages from the events in their text: in slices of bounded work, and the same whatever the slices are."""

import json
from typing import Any

import pytest

from quire.core.outputs import CompletionOutput, RequestOutput
from quire.server.api.chat import SLICE_CHARS
from quire.server.api.generation import TokenUsage
from quire.server.apis.completions.chat_response import ChatResponseBuilder
from quire.server.tools.output_parser import OutputParser
from quire.server.tools.served_formats import OutputReading
from quire.text.tool_formats.table import find_format, find_reasoning
from support.calling_model import WEATHER, call_text
from support.openai_calls import call_of, events_in

CITY = "Ulm" * SLICE_CHARS
TEXT = f"<think>{'so ' * SLICE_CHARS}</think>Well.\n{call_text('get_weather', {'city': CITY})}"


def reading() -> OutputReading:
    row, reasoning = find_format("hermes"), find_reasoning("qwen3")
    return OutputReading(lambda: OutputParser(row, [WEATHER], False, reasoning), "{}-{}".format)


def builder(**fields: Any) -> ChatResponseBuilder:  # noqa: ANN401
    return ChatResponseBuilder(call_of(reading=reading(), **fields), None)


def outputs(*texts: str) -> list[RequestOutput]:
    pieces = [CompletionOutput(0, text, [1]) for text in texts]
    pieces[-1].finish_reason = "stop"
    return [RequestOutput("x", None, [], [piece], finished=False) for piece in pieces]


def checked(message: dict[str, Any]) -> None:
    assert message["reasoning"].split() == ["so"] * SLICE_CHARS
    assert message["content"].strip() == "Well."
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": CITY}


def test_long_message_is_read_in_slices() -> None:
    pieces = list(builder().response(outputs(TEXT), TokenUsage(1, 1, 0)))
    assert pieces.count(b"") >= len(TEXT) // SLICE_CHARS
    (choice,) = json.loads(b"".join(pieces))["choices"]
    checked(choice["message"])
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("size", [7, 100, len(TEXT)])
def test_stream_is_the_same_message(size: int) -> None:
    written, joined = builder(), {"reasoning": "", "content": "", "tool_calls": []}
    texts = [TEXT[start : start + size] for start in range(0, len(TEXT), size)]
    if size == 7:
        texts = [*texts[:200], "".join(texts[200:])]
    chunks = [chunk for output in outputs(*texts) for chunk in events_in(b"".join(written.chunks(0, output)))]
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        for key in ("reasoning", "content"):
            joined[key] += delta.get(key) or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                joined["tool_calls"].append(call)
            else:
                joined["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    checked(joined)
    assert len(chunks) >= len(TEXT) // SLICE_CHARS
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_call_that_comes_with_its_end_has_a_chunk_of_its_own() -> None:
    """A slow reader gets both at once; openai's helper for streams fires no end of a call that begins in the last."""
    (output,) = outputs(call_text("get_weather", {"city": "Ulm"}))
    *_, call, end = [chunk["choices"][0] for chunk in events_in(b"".join(builder().chunks(0, output)))]
    assert call["delta"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert call["finish_reason"] is None
    assert (end["delta"], end["finish_reason"]) == ({}, "tool_calls")
