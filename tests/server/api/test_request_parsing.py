"""From bytes to fields: JSON that is none, types that are others, and the names that errors carry."""

from typing import Any

import msgspec
import pytest

from quire.core.errors import InvalidRequestError
from quire.server.api.request_parsing import decode_body
from quire.server.errors import ApiError, as_api_error
from quire.server.openai.request_models import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

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
        ("n", [True, 1.0, "1", [1]]),
        ("max_tokens", [True, 16.0, "16"]),
        ("min_tokens", [1.5]),
        ("top_k", [1.0]),
        ("seed", ["1", 1.0]),
        ("temperature", [True, "0.5", [0.5], 10**400]),
        ("top_p", [False]),
        ("min_p", ["0"]),
        ("presence_penalty", ["0"]),
        ("frequency_penalty", [{}]),
        ("repetition_penalty", [True]),
        ("stream", [1, "true"]),
        ("stream_options", [True, []]),
        ("ignore_eos", [0]),
        ("echo", [1]),
        ("logprobs", [True, 1.0]),
        ("prompt_logprobs", [True]),
        ("best_of", [1.0]),
        ("return_token_ids", [1]),
        ("include_stop_str_in_output", ["no"]),
        ("skip_special_tokens", [1]),
    ],
)
def test_types_are_strict_and_errors_name_the_field(field: str, values: list[Any]) -> None:
    for value in values:
        error = refusal(msgspec.json.encode({"prompt": "x", field: value}), CompletionBody)
        assert error.param == field
        assert error.message.startswith(f"{field} must be ")


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
        ({"messages": [MESSAGE], "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"messages": [MESSAGE], "logprobs": 1}, "logprobs"),
        ({"messages": [MESSAGE], "top_logprobs": True}, "top_logprobs"),
        ({"messages": [MESSAGE], "max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"messages": [MESSAGE], "chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"messages": [MESSAGE], "add_generation_prompt": "yes"}, "add_generation_prompt"),
    ],
)
def test_errors_name_fields_inside_others(body: dict[str, Any], param: str) -> None:
    assert refusal(msgspec.json.encode(body), ChatBody).param == param


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
    body = {"prompt": "x", "stream_options": {"continuous_usage_stats": True}}
    error = refusal(msgspec.json.encode(body), CompletionBody)
    assert (error.code, error.param) == ("unsupported_parameter", "stream_options.continuous_usage_stats")
    body = {"prompt": "x", "stream_options": {"include_usage": True, "include_obfuscation": True}}
    decode_body(msgspec.json.encode(body), CompletionBody)
    assert not caplog.records
    decode_body(msgspec.json.encode({"prompt": "x", "stream_options": {"usage": True}}), CompletionBody)
    (record,) = caplog.records
    assert record.getMessage().endswith("'stream_options.usage'")
