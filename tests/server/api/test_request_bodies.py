"""From bytes to fields: JSON that is none, types that are others, and the names that errors carry."""

from typing import Any

import msgspec
import pytest

from quire.core.errors import InvalidRequestError
from quire.server.api.request_bodies import decode_body
from quire.server.apis.completions.completion_bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from quire.server.errors import ApiError, as_api_error

MESSAGE = {"role": "user", "content": "hi"}


def refusal(raw: bytes, body_type: Any) -> ApiError:  # noqa: ANN401 (JSON)
    with pytest.raises((ApiError, InvalidRequestError)) as refused:
        decode_body(raw, body_type)
    error = as_api_error(refused.value)
    assert (error.status, error.type) == (400, "invalid_request_error")
    assert len(error.message) < 400
    return error


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"prompt": "x"} x',
        b"{'prompt': 'x'}",
        b'{"prompt": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"n": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"prompt":' * 50_000,
    ],
)
def test_what_is_no_json(raw: bytes) -> None:
    assert refusal(raw, CompletionBody).code == "invalid_json"


@pytest.mark.parametrize("raw", [b"[]", b"null", b'"x"', b"5"])
def test_what_is_no_object(raw: bytes) -> None:
    assert "must be a JSON object" in refusal(raw, CompletionBody).message


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("model", [5, True, []]),
        ("n", ["one", 1.5, [1]]),
        ("max_tokens", ["", 16.5]),
        ("min_tokens", [1.5]),
        ("top_k", [{}]),
        ("seed", ["0x1", 1.5]),
        ("temperature", ["hot", [0.5], 10**400]),
        ("stream", [2, "maybe"]),
        ("stream_options", [True, []]),
        ("ignore_eos", [2]),
        ("echo", [[]]),
        ("logprobs", ["all"]),
        ("prompt_logprobs", ["9" * 5000]),
        ("return_token_ids", ["x"]),
        ("guided_regex", [5]),
    ],
)
def test_errors_of_types_name_the_field(field: str, values: list[Any]) -> None:
    for value in values:
        error = refusal(msgspec.json.encode({"prompt": "x", field: value}), CompletionBody)
        assert error.param == field
        assert error.message.startswith(f"{field} must be ")


@pytest.mark.parametrize(
    ("field", "value", "meant"),
    [
        ("max_tokens", "3", 3),
        ("max_tokens", 3.0, 3),
        ("n", 1.0, 1),
        ("seed", "5", 5),
        ("temperature", "0.5", 0.5),
        ("stream", "true", True),
        ("ignore_eos", 1, True),
        ("logprobs", True, 1),
        ("top_logprobs", "2", 2),
        ("stream_options", {"include_usage": "true"}, {"include_usage": True}),
    ],
)
def test_numbers_and_flags_are_read_as_vllm_reads_them(field: str, value: object, meant: object) -> None:
    for body_type, required in ((CompletionBody, {"prompt": "x"}), (ChatBody, {"messages": [MESSAGE]})):
        if field in body_type.model_fields:
            read = getattr(decode_body(msgspec.json.encode(required | {field: value}), body_type), field)
            read = read.model_dump(exclude_none=True) if field == "stream_options" else read
            assert read == meant


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [MESSAGE] * 4097}, "messages"),
        ({"messages": [MESSAGE, "hi"]}, "messages[1]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [MESSAGE | {"role": 5}]}, "messages[0].role"),
        ({"messages": [MESSAGE, MESSAGE | {"content": 5}]}, "messages[1].content"),
        ({"messages": [MESSAGE | {"content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [MESSAGE], "stream_options": {"include_usage": 2}}, "stream_options.include_usage"),
        ({"messages": [MESSAGE], "logprobs": 2}, "logprobs"),
        ({"messages": [MESSAGE], "top_logprobs": "x"}, "top_logprobs"),
        ({"messages": [MESSAGE], "max_completion_tokens": "x"}, "max_completion_tokens"),
        ({"messages": [MESSAGE], "chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"messages": [MESSAGE], "add_generation_prompt": "please"}, "add_generation_prompt"),
    ],
)
def test_errors_name_fields_inside_others(body: dict[str, Any], param: str) -> None:
    assert refusal(msgspec.json.encode(body), ChatBody).param == param


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"type": "text", "text": None}, "messages[0].content[1].text must be a string, got None"),
        ({"type": "refusal"}, "messages[0].content[1].refusal must be a string, got None"),
        ({"type": "image_url"}, "messages[0].content[1]: images, audio and files are not served"),
        (5, "messages[0].content[1] must be a text or a part of text"),
    ],
)
def test_errors_name_parts_of_contents(part: object, problem: str) -> None:
    body = {"messages": [MESSAGE | {"content": ["hi", part]}]}
    assert refusal(msgspec.json.encode(body), ChatBody).message.startswith(problem)


def test_required_fields_are_named() -> None:
    assert refusal(b"{}", CompletionBody).message == "prompt is missing"
    assert refusal(b"{}", DetokenizeBody).param == "tokens"


def test_a_body_of_errors_is_told_the_first() -> None:
    assert refusal(msgspec.json.encode({"messages": [5] * 4096}), ChatBody).param == "messages[0]"


def test_null_is_the_default_everywhere() -> None:
    for body_type, required in ((CompletionBody, {"prompt": "x"}), (ChatBody, {"messages": [MESSAGE]})):
        names = [name for name, field in body_type.model_fields.items() if not field.is_required()]
        body = decode_body(msgspec.json.encode(dict.fromkeys(names) | required), body_type)
        assert [name for name in names if getattr(body, name) is not None] == []
    assert decode_body(b'{"prompt": null, "messages": null}', TokenizeBody).prompt is None


def test_messages_keep_what_else_they_have() -> None:
    raw = b'{"messages": [{"name": "x", "role": "tool", "tool_call_id": {"a": [1]}}]}'
    (message,) = decode_body(raw, ChatBody).messages
    assert message.model_extra == {"name": "x", "tool_call_id": {"a": [1]}}
    assert message.model_fields_set == {"role", "name", "tool_call_id"}


def test_options_of_a_stream_are_looked_at_like_any_field(caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "x", "stream_options": {"include_usage": True, "include_obfuscation": True}}
    decode_body(msgspec.json.encode(body), CompletionBody)
    assert not caplog.records
    decode_body(msgspec.json.encode({"prompt": "x", "stream_options": {"usage": True}}), CompletionBody)
    (record,) = caplog.records
    assert record.getMessage().endswith("'stream_options.usage'")
