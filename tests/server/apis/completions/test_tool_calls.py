"""Tool calls and reasoning of chats, read from what a model recites."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from quire.engine.options import EngineOptions
from support.calling_model import CLOCK, WEATHER, CallingModel, call_text, write_calling_model
from support.openai_server import Json, OpenAIServer, openai_server

CHAT = "/v1/chat/completions"
ULM, ROME = {"city": "Ulm </tool_call>"}, {"city": "Rōma {"}
TEXTS = {
    "plain": "It is <b>18<|other|> degrees.",
    "call": call_text("get_weather", ULM),
    "calls": f"Let me see.\n{call_text('get_weather', ULM)}\n{call_text('get_time', ROME)}",
    "reasoning": f"<think>\nUlm, is it?\n</think>\n\nYes.\n{call_text('get_weather', ULM)}",
    "thinks": "So it is.</think>Yes.",
}
TOOLS = [WEATHER, CLOCK]
LONG_CALL = {"function": {"name": "f", "arguments": "x" * 1_048_577}}
DEEP = json.loads("[" * 40 + "]" * 40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CallingModel:
    return write_calling_model(tmp_path_factory.mktemp("calling"), TEXTS)


@pytest.fixture(scope="module")
def server(model: CallingModel) -> Iterator[OpenAIServer]:
    with openai_server(EngineOptions(model=str(model.folder))) as running:
        yield running


def asked(model: CallingModel, name: str, **fields: Any) -> Json:  # noqa: ANN401 (JSON)
    return {"messages": model.messages[name], "temperature": 0, "tools": TOOLS} | fields


def answer(server: OpenAIServer, model: CallingModel, name: str, **fields: Any) -> Json:  # noqa: ANN401 (JSON)
    """Return the choice of an answer; that of a stream, joined as clients do, is the same."""
    (choice,) = server.ask(CHAT, **asked(model, name, **fields))["choices"]
    (streamed,) = joined(server.stream(CHAT, **asked(model, name, **fields))).values()
    message = choice["message"]
    assert {key: streamed[key] for key in ("content", "reasoning", "finish_reason")} == {
        "content": message["content"] or "", "reasoning": message["reasoning"] or "",
        "finish_reason": choice["finish_reason"],
    }  # fmt: skip
    assert [call["function"] for call in streamed["tool_calls"]] == [
        call["function"] for call in message.get("tool_calls", [])
    ]
    return choice


def joined(events: list[Json]) -> dict[int, Json]:
    """Return the choices of a stream, by index."""
    choices: dict[int, Json] = {}
    for event in events:
        for choice in event["choices"]:
            empty: Json = {"content": "", "reasoning": "", "tool_calls": [], "finish_reason": None, "logprobs": []}
            whole = choices.setdefault(choice["index"], empty)
            delta = choice["delta"]
            whole["content"] += delta.get("content") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            whole["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(whole["tool_calls"]):
                    assert call["id"].startswith("call_")
                    assert call["type"] == "function"
                    assert call["function"]["name"]
                    whole["tool_calls"].append({"id": call["id"], "function": call["function"]})
                else:
                    assert call.keys() == {"index", "function"}
                    assert call["function"].keys() == {"arguments"}
                    whole["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]
            whole["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
    return choices


def calls_of(choice: Json) -> list[tuple[str, object]]:
    calls = choice["message"].get("tool_calls", [])
    assert all(call["type"] == "function" for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def test_calls_are_no_content(server: OpenAIServer, model: CallingModel) -> None:
    choice = answer(server, model, "call")
    assert calls_of(choice) == [("get_weather", ULM)]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


def test_content_and_several_calls(server: OpenAIServer, model: CallingModel) -> None:
    choice = answer(server, model, "calls")
    assert calls_of(choice) == [("get_weather", ULM), ("get_time", ROME)]
    assert choice["message"]["content"].strip() == "Let me see."
    assert choice["finish_reason"] == "tool_calls"


def test_text_without_calls_is_content(server: OpenAIServer, model: CallingModel) -> None:
    choice = answer(server, model, "plain")
    assert choice["message"]["content"] == "It is <b>18 degrees."
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_special_tokens_remain_if_the_client_asks_for_them(server: OpenAIServer, model: CallingModel) -> None:
    choice = answer(server, model, "plain", skip_special_tokens=False)
    assert choice["message"]["content"] == "It is <b>18<|other|> degrees."
    assert (choice["message"]["reasoning"], choice["message"]["reasoning_content"]) == (None, None)


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": None}])
def test_calls_are_content_where_none_are_asked_for(server: OpenAIServer, model: CallingModel, fields: Json) -> None:
    choice = answer(server, model, "call", **fields)
    assert (choice["message"]["content"] + "</tool_call>").removeprefix("<tool_call>") != ""
    assert '"get_weather"' in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


def test_reasoning_is_apart(server: OpenAIServer, model: CallingModel) -> None:
    choice = answer(server, model, "reasoning")
    assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"]
    assert choice["message"]["reasoning"].strip() == "Ulm, is it?"
    assert choice["message"]["content"].strip() == "Yes."
    assert calls_of(choice) == [("get_weather", ULM)]


def test_reasoning_is_left_out_if_the_client_wants_none(server: OpenAIServer, model: CallingModel) -> None:
    choice = answer(server, model, "reasoning", include_reasoning=False, tools=None)
    assert choice["message"]["reasoning"] is None
    assert choice["message"]["content"].strip().startswith("Yes.")


def test_prompt_may_begin_the_reasoning(server: OpenAIServer, model: CallingModel) -> None:
    fields: Json = {"chat_template_kwargs": {"thinks": True}, "tools": None}
    length = len(server.ask("/tokenize", messages=model.messages["thinks"], **fields)["tokens"])
    shorter = [{"role": "user", "content": model.messages["thinks"][0]["content"]}]
    plain = len(server.ask("/tokenize", messages=shorter)["tokens"])
    shorter[0]["content"] = shorter[0]["content"][: plain - length]
    choice = answer(server, model, "thinks", messages=shorter, **fields)
    assert choice["message"]["reasoning"] == "So it is."
    assert choice["message"]["content"] == "Yes."


def test_reasoning_tokens_are_counted(server: OpenAIServer, model: CallingModel) -> None:
    body = asked(model, "reasoning")
    usage = server.ask(CHAT, **body)["usage"]
    text = TEXTS["reasoning"].partition("</think>")
    expected = len(server.ask("/tokenize", prompt=text[0] + text[1])["tokens"])
    assert usage["completion_tokens_details"] == {"reasoning_tokens": expected}
    assert usage["completion_tokens"] == model.num_tokens["reasoning"]
    last = server.stream(CHAT, **body, stream_options={"include_usage": True})[-1]
    assert last["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]
    assert last["usage"]["completion_tokens"] == usage["completion_tokens"]
    assert server.ask(CHAT, **asked(model, "plain"))["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_output_that_is_cut_has_the_beginning_of_its_call(server: OpenAIServer, model: CallingModel) -> None:
    choice = answer(server, model, "call", max_tokens=model.num_tokens["call"] - 20)
    ((name, arguments),) = [tuple(call["function"].values()) for call in choice["message"]["tool_calls"]]
    assert name == "get_weather"
    assert json.dumps(ULM).startswith(arguments)
    assert choice["finish_reason"] == "length"


def test_stop_string_ends_a_call(server: OpenAIServer, model: CallingModel) -> None:
    choice = answer(server, model, "call", stop=["Ulm"])
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Ulm")


def test_logprobs_are_of_all_tokens(server: OpenAIServer, model: CallingModel) -> None:
    choice = answer(server, model, "calls", logprobs=True)
    text = b"".join(bytes(token["bytes"]) for token in choice["logprobs"]["content"]).decode()
    assert text == TEXTS["calls"] + "</s>"
    (streamed,) = joined(server.stream(CHAT, **asked(model, "calls", logprobs=True))).values()
    assert streamed["logprobs"] == choice["logprobs"]["content"]


def test_each_answer_is_read_by_itself(server: OpenAIServer, model: CallingModel) -> None:
    body = asked(model, "calls", n=3, temperature=1e-3)
    choices = server.ask(CHAT, **body)["choices"]
    assert [calls_of(choice) for choice in choices] == [[("get_weather", ULM), ("get_time", ROME)]] * 3
    assert len({call["id"] for choice in choices for call in choice["message"]["tool_calls"]}) == 6
    streamed = joined(server.stream(CHAT, **body))
    assert [len(streamed[index]["tool_calls"]) for index in range(3)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"tools": "x"}, "tools", "tools must be a list"),
        ({"tools": [{"type": "custom"}]}, "tools", "tools[0] must be of the form"),
        ({"tools": [WEATHER] * 129}, "tools", "at most 128 of them (max_tools)"),
        ({"tool_choice": "any"}, "tool_choice", "must be none, auto, required"),
        ({"tool_choice": "required", "tools": None}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "tool_choice must be {"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "not in tools"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice", "allowed_tools"),
        ({"parallel_tool_calls": "perhaps"}, "parallel_tool_calls", "must be true or false"),
        ({"reasoning_effort": "much"}, "reasoning_effort", "must be one of none, minimal"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "no fields of the body"),
        ({"messages": [{"role": "assistant", "tool_calls": [LONG_CALL]}]}, "messages", "(max_argument_bytes)"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 600_000}}]},
         "tools", "at most 524288 bytes (max_tool_bytes)"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": DEEP}}}]},
         "tools", "nested at most 32 levels deep (max_schema_depth)"),
    ],
)  # fmt: skip
def test_invalid_fields_are_refused(
    server: OpenAIServer, model: CallingModel, fields: Json, param: str, reason: str
) -> None:
    status, error = server.refusal(CHAT, **asked(model, "plain", **fields))
    assert (status, error["param"]) == (400, param), error
    assert reason in error["message"]


def test_tools_are_counted_by_tokenize(server: OpenAIServer, demo_model: Any) -> None:  # noqa: ANN401
    messages = [{"role": "user", "content": "hi"}]
    plain = server.ask("/tokenize", messages=messages)["count"]
    assert server.ask("/tokenize", messages=messages, tools=TOOLS)["count"] == plain  # the template writes none
    assert server.ask("/tokenize", messages=messages, tools=[])["count"] == plain
    for tools in ([1], {}, False, 0, ""):
        status, error = server.refusal("/tokenize", messages=messages, tools=tools)
        assert (status, error["param"]) == (400, "tools")
