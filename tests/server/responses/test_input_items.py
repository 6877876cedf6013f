"""Items as messages: one for each turn of the assistant; what is no text is refused by name."""

import random
from typing import Any

import pytest

from quire.core.errors import InvalidRequestError
from quire.server.errors import ApiError, as_api_error
from quire.server.responses.input_items import messages_of

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
        ([{"type": "web_search_call"}], "input", "input[0].type must be one of message"),
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
