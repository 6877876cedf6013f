"""Parameters that are no fields: each that OpenAI's client can send is refused or let pass, never overlooked."""

import logging
from typing import Any

import pytest
from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams

from quire.server.api.request_bodies import check_field_names
from quire.server.apis.completions.completion_bodies import (
    OTHER_FIELDS,
    UNSUPPORTED,
    WITHOUT_EFFECT,
    ChatBody,
    CompletionBody,
)
from quire.server.errors import ApiError
from support.vllm_fields import CHAT_REQUEST, COMPLETION_REQUEST


def test_every_parameter_of_openai_is_known() -> None:
    for params, body_type in ((CompletionParams, CompletionBody), (ChatParams, ChatBody)):
        unknown = set(params.__annotations__) - body_type.model_fields.keys() - UNSUPPORTED.keys() - WITHOUT_EFFECT
        assert not unknown
    options = {f"stream_options.{name}" for name in ChatCompletionStreamOptionsParam.__annotations__}
    assert options - UNSUPPORTED.keys() - WITHOUT_EFFECT == {"stream_options.include_usage"}


def test_lists_and_objects_are_refused_without_their_size() -> None:
    with pytest.raises(ApiError, match=r"^tools is not supported yet$"):
        check_field_names({"tools": [{}]}, (), OTHER_FIELDS)


# Fields of vLLM's earlier versions.
EARLIER_FIELDS = (
    "best_of", "guided_choice", "guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex",
    "guided_whitespace_pattern", "logits_processors", "structural_tag",
)


@pytest.mark.parametrize(
    ("body_type", "names"), [(CompletionBody, COMPLETION_REQUEST), (ChatBody, CHAT_REQUEST)], ids=["completion", "chat"]
)
def test_every_field_of_vllm_is_honoured_refused_or_without_effect(
    body_type: type[CompletionBody] | type[ChatBody], names: frozenset[str]
) -> None:
    known = body_type.model_fields.keys() | UNSUPPORTED.keys() | WITHOUT_EFFECT
    assert not names.union(EARLIER_FIELDS) - known
    assert not WITHOUT_EFFECT & (UNSUPPORTED.keys() | body_type.model_fields.keys())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "end"),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
        ("audio", {}),
        ("prediction", {}),
        ("reasoning_effort", "low"),
        ("verbosity", "high"),
        ("web_search_options", {}),
        ("store", True),
        ("parallel_tool_calls", False),
        ("structured_outputs", {"json": {}}),
        ("tools", "x" * 1_000_000),
        ("best_of", 2),
        ("include_reasoning", False),
        ("kv_transfer_params", {"a": 1}),
        ("ec_transfer_params", {"a": 1}),
        ("watermarking", True),
        ("return_weight_versions", True),
        ("media_io_kwargs", {"video": {}}),
        ("mm_processor_kwargs", {"x": 1}),
        ("prompt_embeds", "AAAA"),
        ("structural_tag", "{}"),
        ("thinking_token_budget", 5),
        ("vllm_xargs", {"x": 1}),
    ],
)
def test_what_is_not_supported_yet_is_refused(name: str, value: object) -> None:
    with pytest.raises(ApiError) as refused:
        check_field_names({name: value}, (), OTHER_FIELDS)
    error = refused.value
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", name)
    assert len(error.message) < 200


@pytest.mark.parametrize(
    "given",
    [
        {name: value} for name, values in UNSUPPORTED.items() for value in (None, *values)
    ],
    ids=str,
)
def test_values_that_change_nothing_pass(given: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    check_field_names(given, (), OTHER_FIELDS)
    assert not caplog.records


def test_defaults_of_another_type_do_not_pass() -> None:
    for name, value in (("store", 0), ("parallel_tool_calls", 1)):
        with pytest.raises(ApiError):
            check_field_names({name: value}, (), OTHER_FIELDS)


def test_names_without_effect_pass_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    given = {"user": "me", "metadata": {"a": "b"}, "safety_identifier": 5, "prompt_cache_key": "k"}
    check_field_names(given, (), OTHER_FIELDS)
    assert not caplog.records


def test_unknown_names_are_logged_once_and_shortened(caplog: pytest.LogCaptureFixture) -> None:
    given = {"temprature": 0, "prompt": "x"} | {f"{i}" + "x" * 10_000: i for i in range(10_000)}
    with caplog.at_level(logging.WARNING):
        check_field_names(given, {"prompt"}, OTHER_FIELDS)
    (record,) = caplog.records
    assert record.getMessage().startswith("10001 unknown fields of a request are ignored: 'temprature', ")
    assert len(record.getMessage()) < 1500
