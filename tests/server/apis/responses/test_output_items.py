"""Items and events from an output: the same whatever the pieces are, and each event as openai's SDK declares it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from quire.core.logprob_table import LogprobTable
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.core.token_ids import pack_tokens
from quire.engine.requests.input_processor import CheckedParams, PreparedRequest, TokenizedPrompt
from quire.server.api.generation import TokenUsage
from quire.server.apis.responses.responses_bodies import ResponsesBody, Tools
from quire.server.apis.responses.responses_builder import MAX_ECHO_BYTES, ResponsesBuilder, ResponsesRequest
from quire.server.errors import ApiError
from quire.server.tools.output_parser import OutputParser
from quire.server.tools.served_formats import OutputReading
from quire.text.tokenizer import Tokenizer
from quire.text.tool_formats.table import find_format, find_reasoning
from support.calling_model import CLOCK, WEATHER, call_text
from support.text_tokenizers import write_folder

GIVEN = Tools([], frozenset({"patch"}), {"team__close": ("team", "close"), "mcp__fs__read": ("mcp__fs__", "read")})
PATCH = {"type": "function", "function": {"name": "patch", "parameters": {"type": "object"}}}
ULM = {"city": "Ulm </tool_call>"}
CALLS = f"{call_text('get_weather', ULM)}\n{call_text('get_time', ULM)}"
TEXTS = {
    "plain": "It is 18 degrees.\n\n",
    "nothing": "",
    "blank": " \n",
    "all": f"<think>\nUlm, is it?\n</think>\n\n Yes.\n{CALLS}",
    "calls": f"<think>So.</think>\n\n{CALLS}",
    "custom": call_text("patch", {"input": "*** Begin\n\"é\"\n"}),
    "wrong custom": call_text("patch", {"text": "x"}),
    "in namespaces": f"{call_text('team__close', {'id': 'a'})}{call_text('mcp__fs__read', {})}",
    "cut": f"Yes. {call_text('get_weather', ULM)[:50]}",
}
FIELDS = {  # fields that grow, by the name of their events
    "output_text": "text", "reasoning_text": "text", "function_call_arguments": "arguments",
    "custom_tool_call_input": "input",
}  # fmt: skip
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def builder(tokenizer: Tokenizer | None = None, *, stream: bool = False, **fields: Any) -> ResponsesBuilder:  # noqa: ANN401
    row, reasoning = find_format("hermes"), find_reasoning("qwen3")
    tools = [WEATHER, CLOCK, PATCH]
    reading = OutputReading(lambda: OutputParser(row, tools, False, reasoning), "call_{}-{}".format)
    params, prompt = SamplingParams(max_tokens=8, logprobs=fields.pop("logprobs", None)), pack_tokens([5])
    prepared = PreparedRequest(Request(0, prompt, params, seed=0, max_tokens=8), TokenizedPrompt(None, prompt))
    request = ResponsesRequest(
        id="resp_1", model="tiny", created=0, checked=CheckedParams(params, None, 0, None), requests=[prepared],
        reading=reading, body=ResponsesBody(input="x", **fields), given_tools=GIVEN, stream=stream,
    )  # fmt: skip
    return ResponsesBuilder(request, tokenizer)


def outputs(*texts: str, reason: Any = "stop") -> list[RequestOutput]:  # noqa: ANN401
    pieces = [CompletionOutput(0, text, [1]) for text in texts]
    pieces[-1].finish_reason = reason
    return [RequestOutput("x", None, [], [piece], finished=False) for piece in pieces]


def whole(text: str, reason: str = "stop", **fields: Any) -> dict[str, Any]:  # noqa: ANN401
    written = b"".join(builder(**fields).response(outputs(text, reason=reason), TokenUsage(1, 1, 0)))
    response: dict[str, Any] = json.loads(written)
    Response.model_validate(response)
    return response


def events_in(stream: bytes) -> Iterator[dict[str, Any]]:
    *events, rest = stream.decode().split("\n\n")
    assert rest == ""
    for event in events:
        name, _, data = event.partition("\n")
        fields = json.loads(data.removeprefix("data: "))
        assert name == f"event: {fields['type']}"
        EVENTS.validate_python(fields)
        yield fields


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of a stream as a client joins them, and check what the events say of them."""
    items: list[dict[str, Any]] = []
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        kind = event["type"].removeprefix("response.")
        if "output_index" not in event:
            continue
        index = event["output_index"]
        if kind == "output_item.added":
            assert (index, event["item"]["status"]) == (len(items), "in_progress")
            items.append(event["item"])
            continue
        item = items[index]
        if kind == "output_item.done":
            for name in ("content", "arguments", "input"):
                assert event["item"].get(name) == item.get(name)
            items[index] = event["item"]
            continue
        assert event["item_id"] == item["id"]
        what, _, step = kind.rpartition(".")
        holder = item["content"][event["content_index"]] if step != "added" and "content_index" in event else item
        if what == "content_part":
            if step == "added":
                item["content"].append(event["part"])
            assert event["part"] == item["content"][event["content_index"]]
        elif step == "delta":
            holder[FIELDS[what]] += event["delta"]
            if "logprobs" in event:
                holder["logprobs"] += event["logprobs"]
        else:
            assert event[FIELDS[what]] == holder[FIELDS[what]]
            assert event.get("logprobs") == holder.get("logprobs")
    return items


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key != "id"} for item in items]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_stream_has_the_same_items_whatever_its_pieces_are(name: str, size: int) -> None:
    text, reason = TEXTS[name], "length" if name == "cut" else "stop"
    response = whole(text, reason)
    written = builder(stream=True)
    stream = written.first_chunk()
    for output in outputs(*([text[at : at + size] for at in range(0, len(text), size)] or [""]), reason=reason):
        stream += b"".join(written.chunks(0, output))
    events = list(events_in(stream))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert {event["response"]["status"] for event in events[:2]} == {"in_progress"}
    assert events[-1]["type"] == f"response.{response['status']}"
    items = joined(events)
    assert items == events[-1]["response"]["output"]
    assert without_ids(items) == without_ids(response["output"])
    assert len({item["id"] for item in items}) == len(items)


def test_items_of_an_output() -> None:
    reasoning, message, *calls = whole(TEXTS["all"])["output"]
    assert reasoning["type"] == "reasoning"
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Ulm, is it?"}]
    assert (message["role"], message["status"]) == ("assistant", "completed")
    assert message["content"][0]["text"].strip() == "Yes."
    assert {call["type"] for call in calls} == {"function_call"}
    assert [(call["name"], call["call_id"], json.loads(call["arguments"])) for call in calls] == [
        ("get_weather", "call_get_weather-0", ULM), ("get_time", "call_get_time-1", ULM)
    ]  # fmt: skip


def test_white_space_between_reasoning_and_calls_is_no_message() -> None:
    assert [item["type"] for item in whole(TEXTS["calls"])["output"]] == ["reasoning", "function_call", "function_call"]


@pytest.mark.parametrize("name", ["nothing", "blank"])
def test_output_of_no_words_is_a_message(name: str) -> None:
    (message,) = whole(TEXTS[name])["output"]
    assert message["content"][0]["text"] == TEXTS[name]


def test_custom_call_has_its_input_as_text() -> None:
    (call,) = whole(TEXTS["custom"])["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", '*** Begin\n"é"\n')
    (call,) = whole(TEXTS["wrong custom"])["output"]
    assert json.loads(call["input"]) == {"text": "x"}


def test_call_of_a_tool_in_a_namespace_names_both() -> None:
    calls = whole(TEXTS["in namespaces"])["output"]
    assert [(call["namespace"], call["name"]) for call in calls] == [("team", "close"), ("mcp__fs__", "read")]
    assert all("namespace" not in item for item in whole(TEXTS["calls"])["output"])


def test_cut_output_is_incomplete() -> None:
    response = whole(TEXTS["cut"], "length")
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    (message,) = whole(TEXTS["plain"], "length")["output"]
    assert message["status"] == "incomplete"


def test_error_ends_a_stream_with_a_failed_response() -> None:
    written = builder(stream=True)
    stream = written.first_chunk() + b"".join(written.chunks(0, outputs("Yes", "x")[0]))
    stream += written.error_chunk(ApiError(503, "it died", type="server_error", code="engine_unhealthy"))
    *_, error, failed = events_in(stream)
    assert (error["type"], error["code"], error["message"]) == ("error", "engine_unhealthy", "it died")
    assert failed["type"] == "response.failed"
    assert (failed["response"]["status"], failed["response"]["error"]["message"]) == ("failed", "it died")
    (message,) = failed["response"]["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "Yes")
    assert failed["sequence_number"] == error["sequence_number"] + 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_folder("byte_level", tmp_path_factory.mktemp("byte_level")))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_logprobs_are_those_of_the_message(size: int, tokenizer: Tokenizer) -> None:
    text = TEXTS["all"]
    ids = tokenizer.encode(text, add_special_tokens=False)
    positions = [([token, 6], [-0.5, -1.5], [1, 2]) for token in ids]

    def pieces(size: int) -> list[RequestOutput]:
        found, done = [], ""
        for at in range(0, len(ids), size):
            now = tokenizer.decode(ids[: at + size], skip_special_tokens=False)
            table = LogprobTable.of(positions[at : at + size])
            found.append(CompletionOutput(0, now[len(done) :], ids[at : at + size], packed_logprobs=table))
            done = now
        assert done.strip() == text.strip()
        found[-1].finish_reason = "stop"
        return [RequestOutput("x", None, [], [piece], finished=False) for piece in found]

    written = builder(tokenizer, stream=True, logprobs=1)
    stream = written.first_chunk() + b"".join(b"".join(written.chunks(0, each)) for each in pieces(size))
    streamed = joined(list(events_in(stream)))[1]
    response = json.loads(b"".join(builder(tokenizer, logprobs=1).response(pieces(1000), TokenUsage(1, 1, 0))))
    (part,) = response["output"][1]["content"]
    assert streamed["content"] == [part]
    assert "".join(each["token"] for each in part["logprobs"]).strip() == part["text"].strip() == "Yes."
    assert all(len(each["top_logprobs"]) == 1 for each in part["logprobs"])


def test_long_fields_are_not_repeated() -> None:
    short, long = "x" * 100, "x" * MAX_ECHO_BYTES
    assert whole("", instructions=short)["instructions"] == short
    assert whole("", instructions=long)["instructions"] is None
    tool = {"type": "function", "name": "f", "description": long}
    assert whole("", tools=[tool])["tools"] == []
    assert whole("", tools=[tool | {"description": short}])["tools"][0]["description"] == short
