"""Calls that a grammar forces: required, of one function, of some, strict, and one at most."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from quire.engine.options import EngineOptions
from support.calling_model import CLOCK, WEATHER, CallingModel, call_text, write_calling_model
from support.openai_server import Json, OpenAIServer, openai_server

CHAT = "/v1/chat/completions"
PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 3},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
HOSTILE = {"allOf": [{"type": "string", "pattern": f"(x|y){{0,{size}}}[ab]{{{size}}}"} for size in range(1, 60)]}
FORECAST = {"type": "function", "function": {"name": "get_forecast", "parameters": PLACE}}
NOW = {"type": "function", "function": {"name": "now"}}
ULM = {"city": "Ulm"}
TEXTS = {
    "plain": "It is 18 degrees, and that is that.",
    "calls": f"Let me see.\n{call_text('get_weather', ULM)}\n{call_text('get_time', ULM)}",
    "reasoning": f"<think>Ulm?</think>\n{call_text('get_weather', ULM)}",
}


def named(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> Json:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def calls_of(choice: Json) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls", [])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


# --- by a model that knows nothing of tools ---------------------------------------------------------------------------


def asked(**fields: Any) -> Json:  # noqa: ANN401 (JSON)
    messages = [{"role": "user", "content": "Write a function."}]
    return {"messages": messages, "tools": [FORECAST, NOW], "seed": 1, "max_tokens": 400} | fields


@pytest.mark.parametrize("temperature", [0, 1])
def test_required_calls_fit_their_schema(server: OpenAIServer, temperature: float) -> None:
    body = asked(tool_choice="required", parallel_tool_calls=False, temperature=temperature, n=4 if temperature else 1)
    for choice in server.ask(CHAT, **body)["choices"]:
        ((name, arguments),) = calls_of(choice)
        jsonschema.validate(arguments, {"get_forecast": PLACE, "now": {"maxProperties": 0}}[name])
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)


def test_named_call_is_streamed(server: OpenAIServer) -> None:
    body = asked(tool_choice=named("get_forecast"))
    events = server.stream(CHAT, **body)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0]["role"] == "assistant"
    parts = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [part["index"] for part in parts] == [0] * len(parts)
    assert [part["function"]["name"] for part in parts if "name" in part["function"]] == ["get_forecast"]
    assert not any(delta.get("content") for delta in deltas)
    arguments = "".join(part["function"]["arguments"] for part in parts)
    jsonschema.validate(json.loads(arguments), PLACE)
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    (choice,) = server.ask(CHAT, **body)["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_forecast", "arguments": arguments}


def test_call_that_is_cut_is_incomplete(server: OpenAIServer) -> None:
    (choice,) = server.ask(CHAT, **asked(tool_choice=named("get_forecast"), max_tokens=12))["choices"]
    assert choice["finish_reason"] == "length"


def test_logprobs_of_forced_calls(server: OpenAIServer) -> None:
    answer = server.ask(CHAT, **asked(tool_choice=named("now"), logprobs=True, top_logprobs=2))
    tokens = answer["choices"][0]["logprobs"]["content"]
    assert len(tokens) == answer["usage"]["completion_tokens"]
    assert '"name": "now"' in b"".join(bytes(token["bytes"]) for token in tokens).decode()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "http://x/y"}}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}}}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {"a": HOSTILE}}}}]}, "tools"),
    ],
)  # fmt: skip
def test_what_cannot_be_forced_is_refused(server: OpenAIServer, fields: Json, param: str) -> None:
    status, error = server.refusal(CHAT, **asked(tool_choice="required", **fields))
    assert (status, error["param"]) == (400, param), error


def test_beams_fit_the_schema_of_a_required_call(server: OpenAIServer) -> None:
    body = asked(tool_choice=named("get_forecast"), use_beam_search=True, n=2, temperature=0, max_tokens=100)
    choices = server.ask(CHAT, **body)["choices"]
    assert len(choices) == 2
    for choice in choices:
        ((_, arguments),) = calls_of(choice)
        jsonschema.validate(arguments, PLACE)


# --- in the notation of the model's calls -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tagged() -> Iterator[OpenAIServer]:
    with openai_server(EngineOptions(), tool_call_parser="qwen3_coder") as running:
        yield running


def tool_of(part: Json, name: str = "city") -> Json:
    schema = {"type": "object", "properties": {name: part}, "required": [name], "additionalProperties": False}
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def test_tagged_parameters_fit_their_schema(tagged: OpenAIServer) -> None:
    for part in ({"type": "string", "pattern": "^[ab]{3,5}$"}, {"enum": ["Ulm", "Rome", "Uelzen"]}):
        tool = tool_of(part)
        fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        ((_, arguments),) = calls_of(tagged.ask(CHAT, **asked(**fields))["choices"][0])
        jsonschema.validate(arguments, tool["function"]["parameters"])


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        (tool_of({"type": "string"}, "a<b"), "f requires the property 'a<b', which cannot be written"),
        (tool_of({"type": "string", "minLength": 3000, "maxLength": 100_000}), "fuel exhausted"),
    ],
    ids=["a name that ends its tag", "more work as text than as JSON"],
)
def test_what_the_notation_cannot_force_is_refused(tagged: OpenAIServer, tool: Json, reason: str) -> None:
    status, error = tagged.refusal(CHAT, **asked(tool_choice="required", tools=[tool]))
    assert (status, error["param"]) == (400, "tools")
    assert error["message"].startswith("tools cannot be enforced: ")
    assert reason in error["message"]
    free = tagged.ask(CHAT, **asked(tools=[tool], max_tokens=4))
    assert free["choices"][0]["finish_reason"] in ("length", "stop")


# --- by a model that calls tools --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CallingModel:
    return write_calling_model(tmp_path_factory.mktemp("calling"), TEXTS)


@pytest.fixture(scope="module")
def caller(model: CallingModel) -> Iterator[OpenAIServer]:
    with openai_server(EngineOptions(model=str(model.folder))) as running:
        yield running


def choice_of(caller: OpenAIServer, model: CallingModel, name: str, **fields: Any) -> Json:  # noqa: ANN401 (JSON)
    body = {"messages": model.messages[name], "temperature": 0, "tools": [WEATHER, CLOCK], "max_tokens": 200}
    choice: Json = caller.ask(CHAT, **body | fields)["choices"][0]
    return choice


def test_one_call_at_most(caller: OpenAIServer, model: CallingModel) -> None:
    assert len(calls_of(choice_of(caller, model, "calls"))) == 2
    choice = choice_of(caller, model, "calls", parallel_tool_calls=False)
    assert calls_of(choice) == [("get_weather", ULM)]
    assert choice["message"]["content"].strip() == "Let me see."
    assert choice["finish_reason"] == "tool_calls"


def test_only_allowed_tools_are_called(caller: OpenAIServer, model: CallingModel) -> None:
    for mode in ("auto", "required"):
        choice = choice_of(caller, model, "calls", tool_choice=allowed(mode, "get_time"), max_tokens=300)
        assert {call["function"]["name"] for call in choice["message"]["tool_calls"]} == {"get_time"}


def test_strict_arguments_fit_their_schema(caller: OpenAIServer, model: CallingModel) -> None:
    schema = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"],
              "additionalProperties": False}  # fmt: skip
    function = {"name": "get_weather", "description": "of a city", "strict": True, "parameters": schema}
    tool = {"type": "function", "function": function}  # the template writes no tool that names a city
    choice = choice_of(caller, model, "calls", tools=[tool], parallel_tool_calls=False)
    ((name, arguments),) = calls_of(choice)
    assert (name, arguments["unit"] in "CF") == ("get_weather", True)
    assert choice["message"]["content"].strip() == "Let me see."


def test_text_without_calls_is_free(caller: OpenAIServer, model: CallingModel) -> None:
    tool = WEATHER | {"function": WEATHER["function"] | {"strict": True}}
    choice = choice_of(caller, model, "plain", tools=[tool])
    assert (choice["message"]["content"], choice["finish_reason"]) == (TEXTS["plain"], "stop")


def test_forced_calls_follow_the_reasoning(caller: OpenAIServer, model: CallingModel) -> None:
    choice = choice_of(caller, model, "reasoning", tool_choice="required", parallel_tool_calls=False)
    assert choice["message"]["reasoning"] == "Ulm?"
    assert calls_of(choice) == [("get_weather", ULM)]


def test_forced_calls_need_no_text(caller: OpenAIServer, model: CallingModel) -> None:
    choice = choice_of(caller, model, "plain", tool_choice=named("get_time"), max_tokens=300)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_time"]


# --- with a form of the answer ----------------------------------------------------------------------------------------

SHORT = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "short", "schema": SHORT}}


def test_answer_beside_tools_is_a_call_or_has_its_form(caller: OpenAIServer, model: CallingModel) -> None:
    choice = choice_of(caller, model, "calls", response_format=FORMAT, parallel_tool_calls=False)
    ((name, arguments),) = calls_of(choice)  # the model would write text, which only a call may replace
    assert (name in ("get_weather", "get_time"), arguments.keys()) == (True, {"city"})
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    answer = choice_of(caller, model, "plain", response_format=FORMAT, tool_choice="none")
    jsonschema.validate(json.loads(answer["message"]["content"]), SHORT)
    assert (answer["finish_reason"], calls_of(answer)) == ("stop", [])


def test_answer_has_its_form_behind_the_reasoning(caller: OpenAIServer, model: CallingModel) -> None:
    choice = choice_of(caller, model, "reasoning", response_format=FORMAT, tools=None)
    assert choice["message"]["reasoning"] == "Ulm?"
    jsonschema.validate(json.loads(choice["message"]["content"]), SHORT)


def test_whole_output_has_its_form_where_the_server_says_so(model: CallingModel) -> None:
    config = '{"enable_in_reasoning": true, "disable_any_whitespace": true}'
    with openai_server(EngineOptions(model=str(model.folder)), structured_outputs_config=config) as server:
        choice = choice_of(server, model, "reasoning", response_format=FORMAT, tools=None)
    assert choice["message"]["content"] in ('{"n":1}', '{"n":2}')
    assert not choice["message"].get("reasoning")
