"""The Messages API, asked by Anthropic's own client: answers, streams, tools, and what is refused."""

import json
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic, APIStatusError
from anthropic.types import Message

from quire.engine.options import EngineOptions
from quire.server.apis.messages import message_builder
from support.calling_model import CITY, CallingModel, call_text, write_calling_model
from support.openai_server import LIMIT_S, NAME, OpenAIServer, openai_server

ULM, ROME = {"city": "Ulm </tool_call>"}, {"city": "Rōma {"}
TEXTS = {
    "plain": "It is 18 degrees.\nAnd so on.",
    "blank": " \n",
    "calls": f"Let me see.\n{call_text('get_weather', ULM)}\n{call_text('get_time', ROME)}",
    "reasoning": f"<think>\nUlm, is it?\n</think>\n\nYes.\n{call_text('get_weather', ULM)}",
}
TOOLS: list[dict[str, Any]] = [
    {"name": "get_weather", "input_schema": CITY},
    {"name": "get_time", "description": "Tells the time", "input_schema": CITY, "cache_control": {"type": "ephemeral"}},
]
GREEDY = {"extra_body": {"temperature": 0}}
MAX_MODEL_LEN = 4096


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CallingModel:
    return write_calling_model(tmp_path_factory.mktemp("calling"), TEXTS)


@pytest.fixture(scope="module")
def server(model: CallingModel) -> Iterator[OpenAIServer]:
    options = EngineOptions(model=str(model.folder), num_kv_blocks=512)
    with openai_server(options) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: OpenAIServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        yield client


def answer(client: Anthropic, **fields: Any) -> Message:  # noqa: ANN401 (the body's)
    """Return an answer; the stream of the same request builds the same message."""
    asked = {"model": NAME, "max_tokens": 300} | GREEDY | fields
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert [_without_ids(block) for block in streamed.content] == [_without_ids(block) for block in whole.content]
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    return whole


def _without_ids(block: Any) -> dict[str, Any]:  # noqa: ANN401 (one of many classes)
    written: dict[str, Any] = block.model_dump()
    written.pop("id", None)
    return written


def prompt_tokens(message: Message) -> int:
    """Return the tokens of a prompt: those that were computed, read from the cache, and written to it."""
    usage = message.usage
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


def refusal(client: Anthropic, **fields: Any) -> tuple[int, str, str]:  # noqa: ANN401 (the body's)
    """Return the status of a refusal, the type of the error, and its message."""
    asked: dict[str, Any] = {"model": NAME, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(APIStatusError) as caught:
        client.messages.create(**asked | fields)
    body: Any = caught.value.body
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    return caught.value.status_code, body["error"]["type"], body["error"]["message"]


# --- answers ----------------------------------------------------------------------------------------------------------


def test_text(client: Anthropic, model: CallingModel) -> None:
    message = answer(client, messages=model.messages["plain"])
    assert [block.model_dump() for block in message.content] == [
        {"type": "text", "text": TEXTS["plain"], "citations": None}
    ]
    assert (message.stop_reason, message.role, message.model) == ("end_turn", "assistant", NAME)
    assert message.usage.output_tokens == model.num_tokens["plain"]


def test_white_space_alone_is_a_block_all_the_same(client: Anthropic, model: CallingModel) -> None:
    (block,) = answer(client, messages=model.messages["blank"]).content
    assert block.model_dump() == {"type": "text", "text": " \n", "citations": None}


def test_stop_sequence_is_told(client: Anthropic, model: CallingModel) -> None:
    message = answer(client, messages=model.messages["plain"], stop_sequences=["\n", "never"])
    assert [block.model_dump()["text"] for block in message.content] == ["It is 18 degrees."]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "\n")


def test_calls_are_blocks(client: Anthropic, model: CallingModel) -> None:
    message = answer(client, messages=model.messages["calls"], tools=TOOLS)
    assert [_without_ids(block) for block in message.content] == [
        {"type": "text", "text": "Let me see.", "citations": None},
        {"type": "tool_use", "name": "get_weather", "input": ULM, "caller": None, "toolset_name": None},
        {"type": "tool_use", "name": "get_time", "input": ROME, "caller": None, "toolset_name": None},
    ]
    assert message.stop_reason == "tool_use"


def test_reasoning_is_a_block(client: Anthropic, model: CallingModel) -> None:
    message = answer(client, messages=model.messages["reasoning"], tools=TOOLS)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    thinking = message.content[0].model_dump()
    assert (thinking["thinking"].strip(), thinking["signature"]) == ("Ulm, is it?", "")


@pytest.mark.parametrize("text", ['{"a": 1', '{"a":' * 100_000, "[1]"], ids=["cut", "deep", "list"])
def test_arguments_that_are_no_object_are_left_out(text: str) -> None:
    assert message_builder._object(text) == {}


def test_cut_call_is_told_by_the_stop_reason(client: Anthropic, model: CallingModel) -> None:
    num_tokens = model.num_tokens["calls"] - 20
    message = answer(client, messages=model.messages["calls"], tools=TOOLS, max_tokens=num_tokens)
    assert message.stop_reason == "max_tokens"
    assert [block.model_dump()["input"] for block in message.content[1:]] == [ULM, {}]


def test_forced_call(client: Anthropic) -> None:
    choice = {"type": "tool", "name": "get_time"}
    tools = [{"name": "get_time", "input_schema": {"type": "object", "properties": {"at": {"enum": ["now", "then"]}},
              "required": ["at"], "additionalProperties": False}}]  # fmt: skip
    message = answer(client, messages=[{"role": "user", "content": "When?"}], tools=tools, tool_choice=choice)
    *_, block = message.content
    assert block.type == "tool_use"
    assert block.input in ({"at": "now"}, {"at": "then"})


def test_answer_of_a_form(client: Anthropic) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
              "required": ["n"], "additionalProperties": False}  # fmt: skip
    config = {"format": {"type": "json_schema", "schema": schema}}
    message = answer(client, messages=[{"role": "user", "content": "Count."}], output_config=config)
    (block,) = message.content
    assert block.type == "text"
    assert json.loads(block.text)["n"] in range(1, 10)


def test_result_of_a_tool_follows_its_call(client: Anthropic, model: CallingModel) -> None:
    first = answer(client, messages=model.messages["calls"], tools=TOOLS)
    turns: list[Any] = [*model.messages["calls"], {"role": "assistant", "content": first.content}]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "18"}
        for block in first.content if block.type == "tool_use"
    ]  # fmt: skip
    turns.append({"role": "user", "content": [*results, {"type": "text", "text": "And now?"}]})
    second = client.messages.create(model=NAME, max_tokens=4, messages=turns, tools=TOOLS)
    assert prompt_tokens(second) > prompt_tokens(first)


def test_last_message_of_the_assistant_is_continued(client: Anthropic) -> None:
    asked: list[Any] = [{"role": "user", "content": "Sing."}, {"role": "assistant", "content": "La"}]
    begun = client.messages.count_tokens(model=NAME, messages=asked)
    answered = client.messages.count_tokens(model=NAME, messages=[*asked, {"role": "user", "content": "More"}])
    assert begun.input_tokens < answered.input_tokens
    assert prompt_tokens(answer(client, messages=asked, max_tokens=2)) == begun.input_tokens


def test_more_tokens_than_fit_are_cut_and_the_header_tells(client: Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "x"}]
    response = client.messages.with_raw_response.create(model=NAME, max_tokens=8000, messages=messages)
    most = int(response.headers["X-Max-Output-Tokens"])
    assert most + prompt_tokens(response.parse()) == MAX_MODEL_LEN
    fits = client.messages.with_raw_response.create(model=NAME, max_tokens=4, messages=messages)
    assert "X-Max-Output-Tokens" not in fits.headers


def test_no_token_fills_the_cache(client: Anthropic) -> None:
    message = client.messages.create(model=NAME, max_tokens=0, messages=[{"role": "user", "content": "warm " * 30}])
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)


def test_tools_of_other_kinds_are_left_out(
    client: Anthropic, model: CallingModel, caplog: pytest.LogCaptureFixture
) -> None:
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    with caplog.at_level(logging.WARNING):
        alone = client.messages.count_tokens(model=NAME, messages=model.messages["plain"], tools=TOOLS)
        both = client.messages.count_tokens(model=NAME, messages=model.messages["plain"], tools=[*TOOLS, search])
    assert alone == both
    assert "1 tools of a request are no functions of its client and are left out: 'web_search_20250305'" in caplog.text


def test_deferred_tools_may_be_called(client: Anthropic, model: CallingModel) -> None:
    tools: Any = [TOOLS[0], {**TOOLS[1], "defer_loading": True}]
    message = answer(client, messages=model.messages["calls"], tools=tools)
    assert [block.name for block in message.content if block.type == "tool_use"] == ["get_weather", "get_time"]


def test_billing_header_is_no_part_of_the_prompt(client: Anthropic) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "x"}]}
    plain = client.messages.count_tokens(**asked, system="Be brief.")
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00000;"}
    marked = client.messages.count_tokens(**asked, system=[header, {"type": "text", "text": "Be brief."}])
    assert marked == plain


KEEPS_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
BETA_BODY: dict[str, Any] = {"context_management": KEEPS_ALL, "thread": {"type": "create"}, "fallbacks": "default"}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_answers_tell_that_no_edit_of_the_context_was_applied(client: Anthropic, *, is_streamed: bool) -> None:
    asked: dict[str, Any] = {"model": NAME, "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    if is_streamed:
        with client.beta.messages.stream(**asked, extra_body=BETA_BODY) as stream:
            managed = next(event.context_management for event in stream if event.type == "message_delta")
    else:
        managed = client.beta.messages.create(**asked, extra_body=BETA_BODY).context_management
    assert managed is not None
    assert managed.applied_edits == []
    del asked["max_tokens"]
    plain = client.beta.messages.count_tokens(**asked)
    assert client.beta.messages.count_tokens(**asked, context_management=KEEPS_ALL) == plain  # type: ignore[arg-type]


def test_reasoning_that_is_to_be_omitted_is_left_out(client: Anthropic, model: CallingModel) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    message = answer(client, messages=model.messages["reasoning"], tools=TOOLS, thinking=thinking)
    assert [block.type for block in message.content] == ["text", "tool_use"]


def test_form_of_an_answer_by_its_name_in_the_first_beta(client: Anthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    given = {"output_format": {"type": "json_schema", "schema": schema}, "temperature": 0}
    messages: Any = [{"role": "user", "content": "hi"}]
    (block,) = client.messages.create(model=NAME, max_tokens=100, messages=messages, extra_body=given).content
    assert block.type == "text"
    assert json.loads(block.text) == {"a": 1}


# --- counting ---------------------------------------------------------------------------------------------------------


def random_conversation(random_: random.Random) -> dict[str, Any]:
    """Return the fields of some conversation with tools, results and reasoning."""

    def text() -> str:
        return "".join(random_.choice("ab \n{<é🙂") for _ in range(random_.randrange(1, 30)))

    messages: list[Any] = []
    for number in range(random_.randrange(1, 4)):
        messages.append({"role": "user", "content": random_.choice([text(), [{"type": "text", "text": text()}] * 2])})
        if random_.random() < 0.5:
            call = {"type": "tool_use", "id": f"t{number}", "name": "get_time", "input": {"city": text()}}
            thinking = {"type": "thinking", "thinking": text(), "signature": ""}
            messages.append({"role": "assistant", "content": [thinking, {"type": "text", "text": text()}, call]})
            result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": text()}
            messages.append({"role": "user", "content": [result]})
        messages.append({"role": "assistant", "content": text()})
    messages.append({"role": "user", "content": text()})
    fields: dict[str, Any] = {"messages": messages}
    if random_.random() < 0.5:
        fields["system"] = text()
    if random_.random() < 0.5:
        fields["tools"] = TOOLS
    return fields


def test_count_is_what_a_message_is_charged(client: Anthropic) -> None:
    random_ = random.Random(7)
    for _ in range(200):
        fields = random_conversation(random_)
        counted = client.messages.count_tokens(model=NAME, **fields).input_tokens
        assert prompt_tokens(client.messages.create(model=NAME, max_tokens=1, **fields)) == counted


def test_stream_begins_with_the_usage_that_it_ends_with(client: Anthropic) -> None:
    """Computed, read and written tokens add up to the prompt in both; a prompt that was seen is read from the cache."""
    messages = [{"role": "user", "content": "what was seen before " * 40}]
    counted = client.messages.count_tokens(model=NAME, messages=messages).input_tokens
    read = []
    for _ in range(2):
        with client.messages.stream(model=NAME, max_tokens=4, messages=messages) as stream:
            events = list(stream)
            whole = stream.get_final_message()
        begun, ended = events[0].message, next(event for event in events if event.type == "message_delta")
        assert prompt_tokens(begun) == prompt_tokens(whole) == counted
        for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
            assert getattr(begun.usage, name) == getattr(ended.usage, name)
        assert begun.usage.output_tokens == 0
        read.append(begun.usage.cache_read_input_tokens or 0)
    assert read[0] < read[1] <= counted


# --- refusals ---------------------------------------------------------------------------------------------------------

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
MARKED = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role must be one of user, assistant, system"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type 'image' is not supported"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0] must be an object with"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text must be a string"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content must be a string or a list"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]}, ".input must"),
    ({"messages": [{"role": "user", "content": [MARKED] * 5}]}, "at most 4 blocks may have cache_control, got 5"),
    ({"system": [IMAGE]}, "system[0].type 'image' is not supported"),
    ({"max_tokens": -1}, "max_tokens must be at least 0, got -1"),
    ({"stop_sequences": ["x"] * 1000}, "stop_sequences must have at most"),
    ({"tools": [{"name": "!", "input_schema": {}}]}, "tools[0].name must be 1 to 128 letters"),
    ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema must be the schema of an o"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type must be one of auto, any, tool, none, got 'some'"),
    ({"thinking": {"type": "deep"}}, "thinking.type must be one of enabled, adaptive, between_tools, disabled"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort must be one of"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format must be"),
    ({"cache_control": {"type": "forever"}}, "cache_control must be"),
    ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control must be"),
    ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers"),
    ({"extra_body": {"context_management": {"edits": "all"}}}, "context_management.edits must be a list of objects"),
    ({"extra_body": {"compaction": {"type": "compaction"}}}, "compaction is not supported"),
    ({"extra_body": {"thread": {"type": "continue", "previous_message_id": "m"}}}, "thread is not supported"),
    ({"extra_body": {"output_format": {"type": "xml"}}}, "output_format must be"),
    ({"messages": [{"role": "user", "content": []}]}, "at least one message"),
    ({"messages": [{"role": "user", "content": "x" * 9000}]}, "prompt is too long: "),
    ({"messages": [{"role": "user", "content": "x" * 200_000}]}, f" tokens > {MAX_MODEL_LEN - 1} maximum"),
    ({"extra_body": {"top_p": 9}}, "top_p must be"),
]


@pytest.mark.parametrize(("fields", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_cannot_be_answered_is_refused_by_name(client: Anthropic, fields: dict[str, Any], text: str) -> None:
    status, kind, message = refusal(client, **fields)
    assert (status, kind) == (400, "invalid_request_error")
    assert text in message


def test_errors_have_anthropics_form_on_all_that_is_answered(server: OpenAIServer, client: Anthropic) -> None:
    assert refusal(client, model="other")[:2] == (404, "not_found_error")
    for method, path, kind in (
        ("GET", "/v1/messages", "invalid_request_error"), ("POST", "/v1/messages/batches", "not_found_error"),
    ):  # fmt: skip
        body = server.http.request(method, path).json()
        assert (body["type"], body["error"]["type"]) == ("error", kind)
    too_large = server.http.post("/v1/messages", content=b" " * (5 << 20), headers={"Content-Type": "application/json"})
    assert (too_large.status_code, too_large.json()["error"]["type"]) == (413, "request_too_large")


def test_client_that_goes_away_ends_its_request(server: OpenAIServer, client: Anthropic, model: CallingModel) -> None:
    with client.messages.stream(model=NAME, max_tokens=300, messages=model.messages["plain"], **GREEDY) as stream:
        next(iter(stream))
    service = server.service
    server.wait_until(lambda: not (service.client.state.num_running or len(service.responses)))
