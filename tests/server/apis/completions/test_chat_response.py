"""Chats as JSON: whole messages, and the pieces that they come in."""

import json
from itertools import chain
from typing import Any

import pytest

from quire.core.outputs import CompletionOutput, RequestOutput
from quire.server.api.generation import TokenUsage
from quire.server.apis.completions.chat_response import ChatResponseBuilder
from quire.server.apis.completions.openai_response import OpenAIRequest
from support.openai_calls import call_of, events_in


def chunks_of(api_request: OpenAIRequest, *steps: list[CompletionOutput]) -> list[dict[str, Any]]:
    """The chunks that a call's pieces are written in."""
    written = ChatResponseBuilder(api_request, None)
    pieces = [written.chunks(0, RequestOutput("x", None, [], step, finished=False)) for step in steps]
    return events_in(b"".join(chain.from_iterable(pieces)))


def deltas(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks]


ROLE = {"role": "assistant", "content": ""}


def test_role_comes_once_and_alone_in_the_first_chunk() -> None:
    chunks = chunks_of(
        call_of(),
        [CompletionOutput(0, "", [1])],
        [CompletionOutput(0, "a", [2])],
        [CompletionOutput(0, "b", [3], finish_reason="length")],
    )
    assert deltas(chunks) == [ROLE, {"content": "a"}, {"content": "b"}]


@pytest.mark.parametrize("shows_tokens", [False, True])
def test_first_chunk_of_every_choice_has_the_role_alone(shows_tokens: bool) -> None:
    """In the order of the choices, whichever has words first: openai's helper for streams relies on both."""
    chunks = chunks_of(
        call_of(n=3, return_token_ids=shows_tokens),
        [CompletionOutput(1, "b", [1]), CompletionOutput(0, "a", [1])],
        [CompletionOutput(2, "c", [1]), CompletionOutput(0, "d", [1])],
    )
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [(choice["index"], choice["delta"]) for choice in choices] == [
        (0, ROLE), (1, ROLE), (2, ROLE),
        (1, {"content": "b"}), (0, {"content": "a"}), (2, {"content": "c"}), (0, {"content": "d"}),
    ]  # fmt: skip
    for choice in choices[:3]:
        assert choice["logprobs"] is choice["finish_reason"] is choice["token_ids"] is None


def test_parts_of_text_alone_have_all_fields() -> None:
    texts = ["a", 'b"\n\u2028', "some text"]
    chunks = chunks_of(call_of(n=2), *([CompletionOutput(index, text, [1])] for text in texts for index in (1, 0)))
    empty = {"logprobs": None, "finish_reason": None, "token_ids": None}
    later = [chunk["choices"][0] for chunk in chunks[2:]]
    assert later == [{"index": index, "delta": {"content": text}} | empty for text in texts for index in (1, 0)]


def test_end_without_words_is_an_empty_delta() -> None:
    chunks = chunks_of(
        call_of(), [CompletionOutput(0, "a", [1])], [CompletionOutput(0, "", [2], finish_reason="stop", stop_reason=7)]
    )
    choice = chunks[-1]["choices"][0]
    assert (choice["delta"], choice["finish_reason"], choice["stop_reason"]) == ({}, "stop", 7)


def test_message_of_no_words_still_has_a_role() -> None:
    chunks = chunks_of(call_of(), [CompletionOutput(0, "", [1], finish_reason="stop")])
    assert deltas(chunks) == [ROLE, {}]


def test_token_without_text_is_told_where_tokens_are_asked_for() -> None:
    steps = [CompletionOutput(0, "", [1])], [CompletionOutput(0, "é", [2])]
    assert len(chunks_of(call_of(), *steps)) == 2
    chunks = chunks_of(call_of(return_token_ids=True), *steps)
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [None, [1], [2]]


def test_first_chunk_tells_of_the_prompt() -> None:
    step = [CompletionOutput(0, "a", [1])]
    chunks = chunks_of(call_of(prompts=[[5, 6]], return_token_ids=True), step, step)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[5, 6], None, None]


def test_usage_is_null_but_for_the_last_chunk() -> None:
    step = [CompletionOutput(0, "a", [1])]
    assert "usage" not in chunks_of(call_of(), step)[0]
    assert chunks_of(call_of(include_usage=True), step)[0]["usage"] is None


def test_name_of_a_model_cannot_break_a_chunk() -> None:
    name = 'a"choices":[\n'
    assert chunks_of(call_of(model=name), [CompletionOutput(0, "x", [1])])[0]["model"] == name


def test_whole_messages() -> None:
    first, second = CompletionOutput(0, "a", [1], finish_reason="stop"), CompletionOutput(1, "b", [2])
    output = RequestOutput("x", None, [], [first, second], finished=True)
    answer = json.loads(b"".join(ChatResponseBuilder(call_of(n=2), None).response([output], TokenUsage(1, 2, 0))))
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["total_tokens"] == 3
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["a", "b"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", None]
    assert all(choice["logprobs"] is choice["token_ids"] is None for choice in answer["choices"])
