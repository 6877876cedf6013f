"""Items as messages: one for each turn of the assistant; what is no text is refused by name."""

import random
from typing import Any

import pytest

from quire.core.errors import InvalidRequestError
from quire.server.apis.responses.input_items import added_tools, messages_of
from quire.server.errors import ApiError, as_api_error

MAX_ITEMS = 16


def messages(*items: dict[str, Any], instructions: str | None = None) -> list[dict[str, Any]]:
    return messages_of(instructions, [*items], MAX_ITEMS)


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def call(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "id": "fc", "call_id": call_id, "name": "f", "arguments": "{}"}


def result(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "18"}


def called(*call_ids: str) -> list[dict[str, Any]]:
    return [{"id": id_, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id_ in call_ids]


def told(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "18"}


def test_text_is_a_message_of_the_user() -> None:
    assert messages_of(None, "hi", MAX_ITEMS) == [said("user", "hi")]
    assert messages_of("Be brief.", "hi", MAX_ITEMS) == [said("system", "Be brief."), said("user", "hi")]


def test_instructions_and_leading_messages_of_the_system_are_one() -> None:
    leading = said("developer", "Here."), said("system", "There.")
    found = messages(*leading, said("user", "hi"), said("developer", "Later."), instructions="Be brief.")
    assert found == [said("system", "Be brief.\n\nHere.\n\nThere."), said("user", "hi"), said("system", "Later.")]


def test_parts_are_joined() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b", "annotations": []}]
    parts.append({"type": "refusal", "refusal": "c"})
    assert messages({"type": "message", "role": "user", "content": parts}) == [said("user", "a\nb\nc")]


def test_turn_of_the_assistant_is_one_message() -> None:
    found = messages(
        said("user", "hi"), reasoning("R"), said("assistant", "A"), call("1"), call("2"), result("1"), result("2"),
        reasoning("S"), call("3"), result("3"), said("assistant", "B"), said("user", "hi"),
    )  # fmt: skip
    assert found == [
        said("user", "hi"),
        {"role": "assistant", "reasoning": "R", "content": "A", "tool_calls": called("1", "2")}, told("1"), told("2"),
        {"role": "assistant", "reasoning": "S", "tool_calls": called("3")}, told("3"),
        said("assistant", "B"), said("user", "hi"),
    ]  # fmt: skip


def test_what_follows_in_another_order_is_another_turn() -> None:
    found = messages(said("assistant", "A"), said("assistant", "B"), call("1"), said("assistant", "C"), reasoning("R"))
    assert found == [
        said("assistant", "A"), {"role": "assistant", "content": "B", "tool_calls": called("1")},
        said("assistant", "C"), {"role": "assistant", "reasoning": "R"},
    ]  # fmt: skip


def test_text_of_the_assistant_behind_a_call_is_in_its_turn() -> None:
    found = messages(reasoning("R"), call("1"), said("assistant", "I look."), result("1"), said("assistant", "B"))
    turn = {"role": "assistant", "reasoning": "R", "tool_calls": called("1"), "content": "I look."}
    assert found == [turn, told("1"), said("assistant", "B")]


def test_reasoning_without_text_is_nothing() -> None:
    encrypted = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "AAAA"}
    summary = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "S"}]}
    assert messages(said("user", "hi"), encrypted) == [said("user", "hi")]
    assert messages(summary) == [{"role": "assistant", "reasoning": "S"}]


def test_custom_calls_have_one_argument() -> None:
    given = {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": 'a "b"'}
    output = {"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "18"}]}
    assistant, tool = messages(given, output)
    assert assistant["tool_calls"][0]["function"] == {"name": "patch", "arguments": '{"input": "a \\"b\\""}'}
    assert tool == told("1")


def function(name: str, arguments: str = "{}", call_id: str = "1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("items", "made", "told"),
    [
        ([call("1") | {"namespace": "team"}], function("team__f"), None),
        ([call("1") | {"namespace": "mcp__fs__"}], function("mcp__fs__f"), None),
        (
            [{"type": "local_shell_call", "id": "x", "call_id": "1", "action": {"type": "exec", "command": ["ls"]}},
             {"type": "local_shell_call_output", "id": "1", "output": "a.txt"}],
            function("local_shell", '{"type": "exec", "command": ["ls"]}'), "a.txt",
        ),
        (
            [{"type": "shell_call", "call_id": "1", "action": {"commands": ["ls"]}},
             {"type": "shell_call_output", "call_id": "1", "output": [{"stdout": "a", "stderr": ""}]}],
            function("shell", '{"commands": ["ls"]}'), '[{"stdout": "a", "stderr": ""}]',
        ),
        (
            [{"type": "apply_patch_call", "call_id": "1", "operation": {"type": "delete_file", "path": "a"}},
             {"type": "apply_patch_call_output", "call_id": "1", "status": "completed"}],
            function("apply_patch", '{"type": "delete_file", "path": "a"}'), "completed",
        ),
        (
            [{"type": "tool_search_call", "call_id": "1", "execution": "client", "arguments": {"query": "q"}},
             {"type": "tool_search_output", "call_id": "1", "tools": [{"type": "function", "name": "found"}]}],
            function("tool_search", '{"query": "q"}'), "found",
        ),
        (
            [{"type": "web_search_call", "id": "1", "status": "completed", "action": {"type": "search", "query": "q"}}],
            function("web_search", '{"type": "search", "query": "q"}'), "completed",
        ),
        (
            [{"type": "code_interpreter_call", "id": "1", "code": "1", "outputs": [{"type": "logs", "logs": "1"}]}],
            function("code_interpreter", '{"code": "1"}'), '[{"type": "logs", "logs": "1"}]',
        ),
        (
            [{"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []},
             {"type": "mcp_call", "id": "1", "name": "f", "arguments": "{}", "server_label": "s", "output": "18"}],
            function("f"), "18",
        ),
    ],
    ids=lambda value: value[-1]["type"] if isinstance(value, list) else "",
)  # fmt: skip
def test_items_of_other_servers_and_tools_are_calls_and_results(
    items: list[dict[str, Any]], made: dict[str, Any], told: str | None
) -> None:
    assistant, *results = messages(*items)
    assert assistant == {"role": "assistant", "tool_calls": [made]}
    expected = [] if told is None else [{"role": "tool", "tool_call_id": "1", "content": told}]
    assert results == expected


def test_plain_texts_and_parts_of_other_apis_are_text() -> None:
    parts = ["a", {"type": "text", "text": "b"}, {"type": "thinking", "thinking": "c"}]
    assert messages({"role": "user", "content": parts}) == [said("user", "a\nb\nc")]


def test_items_may_add_tools() -> None:
    tool = {"type": "function", "name": "f"}
    given = [{"type": "additional_tools", "role": "developer", "tools": [tool]}, {"type": "tool_search_output"}]
    assert added_tools(given) == [tool]
    assert added_tools("hi") == added_tools([said("user", "hi")]) == []
    with pytest.raises(ApiError, match=r"input\[0\]\.tools must be a list"):
        added_tools([{"type": "additional_tools", "tools": 5}])


def test_mutated_items_are_messages_or_an_error() -> None:
    rng, outcomes = random.Random(0), set[bool]()
    kinds = ["message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "other", 5, None]
    values: list[Any] = [None, True, -1, 1e308, "", "x", [], [[]], [None], {}, {"type": "text"}, {"type": []},
                         [{"type": "input_text", "text": "x"}], [{"type": "summary_text", "text": 5}]]  # fmt: skip
    names = ["role", "content", "summary", "call_id", "name", "arguments", "output", "input"]
    sound = dict.fromkeys(names, "x") | {"role": "user"}
    for _ in range(2000):
        changed = {name: rng.choice(values) for name in names if rng.random() < 0.1}
        items = [{"type": rng.choice(kinds)} | sound | changed for _ in range(rng.randrange(1, 4))]
        try:
            found, error = messages(*items), None
        except (ApiError, InvalidRequestError) as refused:
            found, error = [], as_api_error(refused)
        assert all(message["role"] in ("user", "assistant", "tool") for message in found)
        assert error is None or (error.param or "").startswith("input")
        outcomes.add(error is None)
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    ("given", "param", "part"),
    [
        (None, "input", "text, or a list"),
        ([], "input", "text, or a list"),
        (["x"], "input[0]", "an object"),
        ([said("user", "x")] * (MAX_ITEMS + 1), "input", "at most 16 of them (max_messages)"),
        ([said("tool", "x")], "input[0].role", "one of user"),
        ([said("user", "x"), {"role": "user"}], "input[1].content", "a string or a list of parts"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input", "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text", "a string"),
        ([{"type": "item_reference", "id": "msg_1"}], "input", "send the item itself"),
        ([{"type": "image_generation_call"}], "input", "input[0].type must be one of message"),
        ([{"type": "compaction", "encrypted_content": "x"}], "input", "input[0].type must be one of message"),
        ([{"type": "web_search_call"}], "input[0].id", "a string"),
        ([{"type": "shell_call_output", "output": "x"}], "input[0].id", "a string"),
        ([{"type": ["message"]}], "input", "input[0].type must be one of message"),
        ([{"type": "function_call", "call_id": "1", "name": "f"}], "input[0].arguments", "a string"),
        ([{"type": "function_call_output", "output": "x"}], "input[0].call_id", "a string"),
        ([{"type": "function_call_output", "call_id": "1"}], "input[0].output", "a string or a list of parts"),
        ([{"type": "reasoning", "content": 5}], "input[0].content", "a string or a list of parts"),
    ],
)
def test_invalid_items_are_named(given: Any, param: str, part: str) -> None:  # noqa: ANN401 (JSON)
    with pytest.raises((ApiError, InvalidRequestError)) as refused:
        messages_of(None, given, MAX_ITEMS)
    error = as_api_error(refused.value)
    assert (error.status, error.param) == (400, param)
    assert part in error.message
