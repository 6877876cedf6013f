"""Blocks of the Messages API as messages of all chats: what is text, a call, a result, reasoning, or says nothing."""

import json
import logging
from typing import Any

import pytest

from quire.server.apis.messages.messages_bodies import ConversationBody, InputMessage
from quire.server.apis.messages.openai_conversion import (
    check_context_edits,
    deferred_tools,
    openai_messages,
    system_blocks,
    thinking_effort,
)
from quire.server.errors import ApiError

Json = dict[str, Any]
USER = {"role": "user", "content": "hi"}


def converted(*messages: Json, system: object = None) -> list[Json]:
    """Return messages in OpenAI's form, with contents as one text."""
    body = ConversationBody(messages=list(messages), system=system)  # type: ignore[arg-type]
    whole = openai_messages(system_blocks(body.system), body.messages, {})
    return [message | {"content": "\n".join(part["text"] for part in message["content"])} for message in whole]


def text(words: str) -> Json:
    return {"type": "text", "text": words}


SEARCH = {"type": "search_result", "title": "T", "source": "https://x.example", "content": [text("found")]}
PLAIN = {"type": "document", "title": "D", "context": "C", "source": {"type": "text", "data": "t"}}
BLOCKS = {"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}, "title": None}


@pytest.mark.parametrize(
    ("block", "shown"),
    [
        (text("a") | {"citations": None, "cache_control": {"type": "ephemeral"}}, "a"),
        ("plain", "plain"),
        ({"type": "input_text", "text": "a"}, "a"),
        ({"type": "tool_reference", "tool_name": "WebFetch"}, "WebFetch"),
        ({"type": "compaction", "content": "the story so far", "signature": "x"}, "the story so far"),
        ({"type": "compaction", "content": None}, ""),
        (SEARCH, "T\nhttps://x.example\nfound"),
        (PLAIN, "D\nC\nt"),
        (BLOCKS, "a\nb"),
        ({"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}}, ""),
    ],
    ids=lambda value: value.get("type", "") if isinstance(value, dict) else None,
)
def test_blocks_that_are_text_to_a_model_of_text(block: object, shown: str) -> None:
    assert converted({"role": "user", "content": [block]}) == [{"role": "user", "content": shown}]
    if "tool" in str(block) or block == "plain":
        result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
        (message,) = converted({"role": "user", "content": [result]})
        assert message == {"role": "tool", "tool_call_id": "t", "content": shown}


@pytest.mark.parametrize("kind", ["image", "container_upload", "browser_state", "tool_addition", "some_new_block"])
@pytest.mark.parametrize("is_in_result", [False, True])
def test_a_block_that_is_no_text_is_refused_by_its_place(kind: str, *, is_in_result: bool) -> None:
    content: list[Json] = [text("a"), {"type": kind}]
    if is_in_result:
        content = [{"type": "tool_result", "tool_use_id": "t", "content": content}]
    place = "messages[1].content[0].content[1]" if is_in_result else "messages[1].content[1]"
    with pytest.raises(ApiError) as caught:
        converted(USER, {"role": "user", "content": content})
    assert (caught.value.param, caught.value.code) == (f"{place}.type", "unsupported_parameter")
    assert kind in str(caught.value)


@pytest.mark.parametrize("source", [{"type": "base64", "data": "x"}, {"type": "url"}, {"type": "file"}, None])
def test_documents_that_are_no_text_are_refused(source: Json | None) -> None:
    with pytest.raises(ApiError, match="document"):
        converted({"role": "user", "content": [{"type": "document", "source": source}]})


def test_tools_that_a_server_ran_become_calls_and_results() -> None:
    found = [{"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "xyz"}]
    content = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        text("I search."),
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": found},
        {"type": "mcp_tool_listing", "mcp_server_name": "m", "tools": []},
        text("Found."),
        {"type": "mcp_tool_use", "id": "m1", "name": "f", "server_name": "m", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "m1", "content": [text("done")], "is_error": False},
        text("All is done."),
    ]
    first, result, second, other, third, last = converted(USER, {"role": "assistant", "content": content}, USER)[1:]
    assert (first["content"], first["reasoning_content"]) == ("I search.", "hm")
    assert [call["function"] for call in first["tool_calls"]] == [{"name": "web_search", "arguments": {"query": "q"}}]
    assert result["tool_call_id"] == "s1"
    assert '"title": "T"' in result["content"]
    assert "xyz" not in result["content"]
    assert (second["content"], second["tool_calls"][0]["id"]) == ("Found.", "m1")
    assert other == {"role": "tool", "tool_call_id": "m1", "content": "done"}
    assert third == {"role": "assistant", "content": "All is done."}
    assert last["role"] == "user"


def test_results_stand_behind_their_calls_whatever_stands_between() -> None:
    def result(id_: str) -> Json:
        return {"type": "tool_result", "tool_use_id": id_, "content": "18"}

    calls = [{"type": "tool_use", "id": id_, "name": "f", "input": {}} for id_ in ("a", "b")]
    found = converted(
        USER, {"role": "assistant", "content": calls}, {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [text("first"), result("b"), text("then"), result("a")]},
    )  # fmt: skip
    assert [(message["role"], message["content"]) for message in found] == [
        ("user", "hi"), ("assistant", ""), ("tool", "18"), ("tool", "18"), ("system", "Be brief."),
        ("user", "first\nthen"),
    ]  # fmt: skip
    assert [message["tool_call_id"] for message in found[2:4]] == ["b", "a"]


SEARCHED = {"type": "tool_search_tool_search_result", "tool_references": [
    {"type": "tool_reference", "tool_name": "a"}, {"type": "tool_reference", "tool_name": "b"},
]}  # fmt: skip


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ({"type": "tool_result", "content": "no such file", "is_error": True}, "Error: no such file"),
        ({"type": "tool_result", "content": [text("a"), text("b")], "is_error": True}, "Error: a\nb"),
        ({"type": "tool_result", "is_error": True}, "Error:"),
        ({"type": "tool_result", "content": "fine", "is_error": False}, "fine"),
        ({"type": "tool_result", "content": "fine", "is_error": None}, "fine"),
        ({"type": "mcp_tool_result", "content": [text("timeout")], "is_error": True}, "Error: timeout"),
        ({"type": "tool_search_tool_result", "content": SEARCHED}, "a\nb"),
        (
            {"type": "tool_search_tool_result", "content": {"type": "some_error", "error_code": "x"}},
            '{"type": "some_error", "error_code": "x"}',
        ),
    ],
)
def test_results_say_that_a_call_failed_and_name_the_tools_that_were_found(result: Json, shown: str) -> None:
    (message,) = converted({"role": "user", "content": [result | {"tool_use_id": "t"}]})
    assert message == {"role": "tool", "tool_call_id": "t", "content": shown}


def test_an_error_that_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(ApiError, match=r"messages\[0\].content\[0\].is_error must be true or false, got 'yes'"):
        converted({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "is_error": "yes"}]})


def tool(name: str, **fields: object) -> Json:
    return {"name": name, "input_schema": {"type": "object"}, **fields}


def definition(name: str) -> str:
    return json.dumps({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})


@pytest.mark.parametrize(
    ("tools", "names"),
    [
        (None, []),
        ([tool("a"), tool("b", defer_loading=False)], []),
        ([tool("a"), tool("b", defer_loading=True), tool("c", defer_loading=True)], ["b", "c"]),
        ([tool("a", defer_loading=True)], []),                                          # no other would remain
        ([tool("a"), tool("b", defer_loading=True), {"type": "tool_search_tool_bm25_20251119", "name": "s"}], []),
    ],
)
def test_tools_that_the_client_searches_are_deferred(tools: Any, names: list[str]) -> None:  # noqa: ANN401 (JSON)
    assert deferred_tools(tools) == {name: definition(name) for name in names}


def test_first_reference_to_a_deferred_tool_is_its_definition() -> None:
    deferred = {"a": definition("a"), "unknown": "x"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": SEARCHED["tool_references"]}
    found = openai_messages([], [InputMessage(role="user", content=[result, result])], deferred)
    assert [[part["text"] for part in message["content"]] for message in found] == [[definition("a"), "b"], ["a", "b"]]
    assert len(deferred) == 2


def test_a_message_of_the_system_for_one_turn_is_left_out_of_later_ones() -> None:
    hint = {"role": "system", "content": "Be quick.", "clear_at": "next_user_message"}
    stays = hint | {"clear_at": "never"}
    assert "Be quick." in str(converted(USER, hint))
    answer = {"role": "assistant", "content": "ok"}
    assert "Be quick." not in str(converted(USER, hint, answer, USER))
    assert "Be quick." in str(converted(USER, stays, answer, USER))


def test_effort_of_the_last_message_of_the_system_wins() -> None:
    change = {"role": "system", "output_config": {"effort": "low"}}
    body = ConversationBody(messages=[USER, change], output_config={"effort": "high"})  # type: ignore[list-item, arg-type]
    assert thinking_effort(body) == "low"
    assert converted(USER, change) == [USER]


KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}


@pytest.mark.parametrize(
    ("edits", "left_out"),
    [
        ([], None),
        (None, None),
        ([KEEP_ALL, KEEP_ALL | {"keep": {"type": "all"}}], None),
        ([KEEP_ALL | {"keep": {"type": "thinking_turns", "value": 1}}], "1 edits"),
        ([KEEP_ALL, {"type": "clear_tool_uses_20250919", "exclude_tools": ["f"]}], "clear_tool"),
        ([{"type": "compact_20260112"}, {"type": "some_edit_to_come"}], "2 edits"),
    ],
)
def test_edits_of_the_context_are_left_out(
    edits: list[Json] | None, left_out: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    body = ConversationBody(messages=[USER], context_management={"edits": edits})  # type: ignore[list-item]
    with caplog.at_level(logging.WARNING):
        check_context_edits(body)
    assert (left_out or "") in caplog.text
    assert bool(caplog.text) == (left_out is not None)


@pytest.mark.parametrize("edits", ["all", {"type": "x"}, ["x"], [{}]])
def test_what_are_no_edits_of_the_context_are_refused(edits: object) -> None:
    body = ConversationBody(messages=[USER], context_management={"edits": edits})  # type: ignore[list-item]
    with pytest.raises(ApiError, match=r"context_management\.edits must be a list of objects"):
        check_context_edits(body)
