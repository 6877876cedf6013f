"""/v1/responses by openai's SDK and by hand: answers, streams, tools, forms of the text, refusals and bounds."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response
from pydantic import BaseModel

from quire.engine.options import EngineOptions
from quire.server.errors import shutting_down
from support.calling_model import CLOCK, WEATHER, CallingModel, call_text, write_calling_model
from support.openai_server import LIMIT_S, NAME, Json, OpenAIServer, openai_server
from support.small_tokenizers import EOS

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
ULM = {"city": "Ulm </tool_call>"}
TEXTS = {
    "plain": "It is 18 degrees.",
    "call": call_text("get_weather", ULM),
    "reasoning": f"<think>\nUlm, is it?\n</think>\n\nYes.\n{call_text('get_weather', ULM)}",
}
TOOLS = [{"type": "function"} | tool["function"] for tool in (WEATHER, CLOCK)]
LONG = {"input": "hi", "max_output_tokens": 500, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CallingModel:
    return write_calling_model(tmp_path_factory.mktemp("calling"), TEXTS)


@pytest.fixture(scope="module")
def server(model: CallingModel) -> Iterator[OpenAIServer]:
    with openai_server(EngineOptions(model=str(model.folder))) as running:
        yield running


@pytest.fixture(autouse=True)
def idle(server: OpenAIServer) -> Iterator[None]:
    """Check that a test leaves nothing behind."""
    yield
    server.wait_until(server.is_idle)


@pytest.fixture
def client(server: OpenAIServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0) as opened:
        yield opened


def asked(model: CallingModel, name: str, **fields: Any) -> Json:  # noqa: ANN401 (JSON)
    return {"model": NAME, "input": model.messages[name], "temperature": 0, "tools": TOOLS} | fields


def events_of(server: OpenAIServer, **body: Any) -> list[Json]:  # noqa: ANN401 (JSON)
    response = server.http.post(RESPONSES, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    events = [event for event in response.text.split("\n\n")[:-1] if not event.startswith(":")]     # no comments
    return [json.loads(event.partition("\ndata: ")[2]) for event in events]


# --- openai's SDK -----------------------------------------------------------------------------------------------------


def test_response_is_complete(server: OpenAIServer, model: CallingModel) -> None:
    given = {"instructions": "", "metadata": {"a": "b"}, "user": "u", "prompt_cache_key": "k", "top_p": 0.5,
             "store": True, "reasoning": {"effort": "low"}, "max_output_tokens": 50}  # fmt: skip
    answer = server.ask(RESPONSES, **asked(model, "plain", **given))
    response = Response.model_validate(answer)
    assert (response.status, response.output_text) == ("completed", TEXTS["plain"])
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + model.num_tokens["plain"]
    assert response.id.startswith("resp_")
    assert answer["completed_at"] >= answer["created_at"]
    assert {name: answer[name] for name in ("metadata", "user", "prompt_cache_key", "top_p")} == {
        name: given[name] for name in ("metadata", "user", "prompt_cache_key", "top_p")
    }
    assert (answer["store"], answer["truncation"], answer["tool_choice"]) == (False, "disabled", "auto")
    assert (answer["max_output_tokens"], answer["text"]["format"]) == (50, {"type": "text"})
    assert [tool["name"] for tool in answer["tools"]] == ["get_weather", "get_time"]
    optional = {name for name, field in Response.model_fields.items() if not field.is_required()}
    missing = {"access_programs", "conversation", "image", "input_transformations", "moderation", "prompt",
               "prompt_cache_diagnostics", "prompt_cache_options", "tool_usage"}  # fmt: skip
    assert optional - answer.keys() == missing


def test_raw_messages_are_what_the_model_read_and_wrote(server: OpenAIServer, model: CallingModel) -> None:
    body = asked(model, "reasoning", enable_response_messages=True)
    answer, event = server.ask(RESPONSES, **body), events_of(server, **body)[-1]
    for name in ("input_messages", "output_messages"):
        (message,) = answer[name]
        assert message == event["response"][name][0]
        assert message["type"] == "raw_message_tokens"
        decoded = server.ask("/detokenize", tokens=message["tokens"])["prompt"]
        assert message["message"] == decoded.removesuffix(EOS)
    assert answer["output_messages"][0]["message"] == TEXTS["reasoning"]
    assert len(answer["output_messages"][0]["tokens"]) == answer["usage"]["output_tokens"]
    assert not server.ask(RESPONSES, **asked(model, "plain")).keys() & {"input_messages", "output_messages"}


def test_sdk_answers_calls_with_their_results(client: OpenAI, model: CallingModel) -> None:
    first = client.responses.create(**asked(model, "reasoning"))
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert first.usage is not None
    assert first.usage.output_tokens_details.reasoning_tokens > 0
    first = client.responses.create(**asked(model, "call"))
    (call,) = first.output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == ULM
    output = model.result_before("plain", "call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": output}
    given = [*model.messages["call"], call.to_dict(), result]
    second = client.responses.create(**asked(model, "plain", input=given))
    assert second.output_text == TEXTS["plain"]


def test_sdk_reads_streams(client: OpenAI, model: CallingModel) -> None:
    fields = asked(model, "reasoning")
    with client.responses.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Yes."
    whole = client.responses.create(**fields)
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert final.output_text == whole.output_text == "Yes."


class Weather(BaseModel):
    """Weather that a form forces."""

    city: Literal["Ulm", "Rome"]
    is_warm: bool


def test_sdk_parses_forms(client: OpenAI, model: CallingModel) -> None:
    parsed = client.responses.parse(model=NAME, input=model.messages["plain"], text_format=Weather, temperature=0)
    assert isinstance(parsed.output_parsed, Weather)
    with client.responses.stream(model=NAME, input="hi", text_format=Weather, temperature=0) as stream:
        stream.until_done()
        assert isinstance(stream.get_final_response().output_parsed, Weather)
    response = client.responses.parse(
        model=NAME, input="hi", tools=[openai.pydantic_function_tool(Weather)], temperature=0,  # type: ignore[list-item]
        tool_choice={"type": "function", "name": "Weather"},
    )  # fmt: skip
    call = response.output[-1]
    assert call.type == "function_call"
    assert isinstance(call.parsed_arguments, Weather)


def test_json_object_is_a_form(server: OpenAIServer) -> None:
    body = {"input": "hi", "text": {"format": {"type": "json_object"}}, "seed": 0, "max_output_tokens": 8}
    answer = server.ask(RESPONSES, **body)
    assert answer["text"]["format"] == {"type": "json_object"}
    assert answer["output"][0]["content"][0]["text"].lstrip().startswith("{")


# --- input ------------------------------------------------------------------------------------------------------------


def test_items_are_the_messages_of_a_chat(server: OpenAIServer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": '{"city": "Ulm"}'}}
    messages = [
        {"role": "system", "content": "s"}, {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "reasoning": "r", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "t"},
    ]  # fmt: skip
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "get_time", "arguments": '{"city": "Ulm"}'},
        {"type": "function_call_output", "call_id": "1", "output": "t"},
    ]  # fmt: skip
    chat = server.ask(CHAT, messages=messages, tools=[WEATHER, CLOCK], max_tokens=1)
    answer = server.ask(RESPONSES, instructions="s", input=items, tools=TOOLS, max_output_tokens=1)
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] >= chat["usage"]["prompt_tokens"] - 16


def test_body_of_a_coding_agent(server: OpenAIServer, model: CallingModel, caplog: pytest.LogCaptureFixture) -> None:
    """Many tools, some of kinds that only OpenAI runs, results, encrypted reasoning, and fields of the client's own."""
    tools = [
        *({"type": "function", "name": f"tool_{number}", "description": "d" * 400, "strict": False,
           "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}}
          for number in range(27)),
        {"type": "custom", "name": "apply_patch",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin"}},
        {"type": "web_search", "external_web_access": False}, {"type": "local_shell"},
    ]  # fmt: skip
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask before you write."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context/>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAA"},
        {"type": "function_call", "name": "tool_1", "arguments": '{"a": "x"}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": '{"output": "done"}'},
        {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin Patch", "call_id": "call_2"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Done!"},
    ]
    body = {
        "instructions": "You are a coding agent. " * 100, "input": items, "tools": tools, "tool_choice": "auto",
        "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"}, "store": False,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "019a", "service_tier": None,
        "text": {"verbosity": "low"}, "client_metadata": {"x": "y"}, "max_output_tokens": 32,
    }  # fmt: skip
    with caplog.at_level(logging.WARNING, "quire.server.apis.responses"):
        events = events_of(server, **body)
    assert [record.getMessage() for record in caplog.records if "tools" in record.getMessage()] == [
        "2 tools of a request are ignored, which are neither functions nor custom: 'local_shell', 'web_search'"
    ]
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    assert len(events[-1]["response"]["tools"]) == 28


def test_custom_tool_is_called(server: OpenAIServer) -> None:
    tool = {"type": "custom", "name": "say"}
    answer = server.ask(RESPONSES, input="hi", tools=[tool], tool_choice=tool, seed=0, max_output_tokens=30)
    (call,) = answer["output"]
    assert (call["type"], call["name"]) == ("custom_tool_call", "say")


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({}, "input", "input is missing"),
        ({"input": 5}, "input", "text, or a list"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send all items"),
        ({"conversation": "conv_1"}, "conversation", "send all items"),
        ({"background": True}, "background", "use a stream"),
        ({"prompt": {"id": "p"}}, "prompt", "send its text"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input", "send the item itself"),
        ({"input": ""}, None, None),
        ({"tools": {}}, "tools", "a list"),
        ({"tools": [{}]}, "tools[0]", "an object with a type"),
        ({"tools": [{"type": "mcp"}, {"type": "function"}]}, "tools", "tools[1].name must be"),
        ({"tools": TOOLS, "tool_choice": {"type": "mcp"}}, "tool_choice", "function, custom or allowed_tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "not in tools"),
        ({"tools": [{"type": "mcp"}], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"text": {"format": 5}}, "text.format", "an object"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "one of text, json_object"),
        ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema", "text.format.schema"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "one of none, minimal"),
        ({"include": ["all"]}, "include", "message.output_text.logprobs"),
        ({"include": [5]}, "include", "message.output_text.logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs", "20"),
        ({"temperature": -1}, "temperature", "0"),
        ({"metadata": {"a": 1}}, "metadata.a", "a string"),
        ({"context_management": [5]}, "context_management", "a list of objects"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "no fields of the body"),
        ({"input": "x" * 30000}, "input", "4096"),
    ],
)
def test_refusals_name_the_field(server: OpenAIServer, fields: Json, param: str | None, part: str | None) -> None:
    body = fields if not fields else {"input": "hi", "max_output_tokens": 1} | fields
    if part is None:
        server.ask(RESPONSES, **body)
        return
    status, error = server.refusal(RESPONSES, **body)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert part in error["message"]


def test_items_are_bounded(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service, "options", replace(server.service.options, max_messages=3, max_tools=1))
    items = [{"role": "user", "content": "x"}] * 4
    server.ask(RESPONSES, input=items[:3], max_output_tokens=1)
    status, error = server.refusal(RESPONSES, input=items)
    assert (status, error["param"]) == (400, "input")
    assert "at most 3 of them (max_messages)" in error["message"]
    status, error = server.refusal(RESPONSES, input="hi", tools=TOOLS)
    assert (status, error["param"]) == (400, "tools")


# --- lengths, ends and faults -----------------------------------------------------------------------------------------


def test_maximum_is_cut_to_what_fits(server: OpenAIServer) -> None:
    asked = {"input": "hi", "ignore_eos": True, "temperature": 0}
    response = server.http.post(RESPONSES, json=asked | {"max_output_tokens": 32_000})
    answer = response.json()
    most = 4096 - answer["usage"]["input_tokens"]
    assert (response.status_code, response.headers["x-max-output-tokens"]) == (200, str(most))
    assert (answer["usage"]["output_tokens"], answer["max_output_tokens"]) == (most, most)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    response = server.http.post(RESPONSES, json=asked | {"max_output_tokens": 4})
    assert (response.json()["status"], response.headers.get("x-max-output-tokens")) == ("incomplete", None)


def test_client_that_goes_away_frees_its_blocks(server: OpenAIServer) -> None:
    with server.held():
        with server.http.stream("POST", RESPONSES, json=LONG | {"stream": True}) as response:
            text, pieces = "", response.iter_text()
            while "response.created" not in text:
                text += next(pieces)
            server.wait_until(lambda: len(server.service.client._streams) == 1)
        server.wait_until(lambda: len(server.service.client._streams) == 0)
    server.wait_until(server.is_idle)


def test_stream_begins_before_its_first_output(server: OpenAIServer) -> None:
    with server.held(), server.http.stream("POST", RESPONSES, json=LONG | {"stream": True}) as response:
        text, pieces = "", response.iter_text()
        while "response.in_progress" not in text:
            text += next(pieces)
    assert "output_item" not in text


def test_end_of_the_server_ends_a_stream_as_failed(server: OpenAIServer) -> None:
    with server.held(), server.http.stream("POST", RESPONSES, json=LONG | {"stream": True}) as response:
        pieces = response.iter_text()
        text = next(pieces)
        server.on_loop(lambda: server.service.responses.cancel_all(shutting_down()))
        text += "".join(pieces)
    *_, error, failed, rest = text.split("\n\n")
    assert rest == ""
    assert error.startswith("event: error\n")
    assert json.loads(error.partition("data: ")[2])["code"] == "shutting_down"
    assert json.loads(failed.partition("data: ")[2])["response"]["error"]["code"] == "server_error"


def test_full_queue_is_an_error_of_the_contract(server: OpenAIServer) -> None:
    admission = server.service.admission
    server.on_loop(lambda: setattr(admission, "num_preparing", 5000))
    try:
        status, error = server.refusal(RESPONSES, input="hi")
        assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "server_overloaded")
    finally:
        server.on_loop(lambda: setattr(admission, "num_preparing", 0))
