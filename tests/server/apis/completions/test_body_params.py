"""From a body to SamplingParams: the same values mean the same on both routes, and what is wrong is named."""

from typing import Any

import pytest

from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import SamplingParams
from quire.server.apis.completions.completion_bodies import ChatBody, CompletionBody
from quire.server.apis.completions.completion_routes import checked_params
from quire.server.errors import ApiError, as_api_error
from support.openai_server import OpenAIServer

BodyType = type[CompletionBody] | type[ChatBody]
REQUIRED: dict[BodyType, dict[str, Any]] = {
    CompletionBody: {"prompt": "x"},
    ChatBody: {"messages": [{"role": "user", "content": "hi"}]},
}
SHARED: dict[str, Any] = {
    "n": 3,
    "temperature": 2,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 1,
    "frequency_penalty": -1,
    "repetition_penalty": 1.1,
    "seed": 2**63 - 1,
    "stop": "end",
    "stop_token_ids": [5],
    "ignore_eos": True,
    "min_tokens": 2,
    "max_tokens": 9,
    "prompt_logprobs": 2,
    "truncate_prompt_tokens": 7,
    "logit_bias": {"5": 1.5},
    "allowed_token_ids": [5, 6],
    "bad_words": ["x"],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
}


def params_of(server: OpenAIServer, body_type: BodyType, **fields: Any) -> SamplingParams:  # noqa: ANN401 (JSON)
    return checked_params(body_type.model_validate(REQUIRED[body_type] | fields), server.service, {}).params


def refusal(server: OpenAIServer, body_type: BodyType, **fields: Any) -> ApiError:  # noqa: ANN401 (JSON)
    with pytest.raises((ApiError, InvalidRequestError)) as refused:
        params_of(server, body_type, **fields)
    error = as_api_error(refused.value)
    assert error.status == 400
    return error


def test_defaults(server: OpenAIServer) -> None:
    assert params_of(server, CompletionBody) == SamplingParams(max_tokens=16)
    assert params_of(server, ChatBody) == SamplingParams(max_tokens=None)


@pytest.mark.parametrize("body_type", [CompletionBody, ChatBody])
def test_parameters_of_both_routes_mean_the_same(server: OpenAIServer, body_type: BodyType) -> None:
    assert params_of(server, body_type, **SHARED) == SamplingParams(**SHARED)


@pytest.mark.parametrize("body_type", [CompletionBody, ChatBody])
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, -1, 9, 10**30]),
        ("temperature", [-0.1, 2.001, 101]),
        ("top_p", [0, 1.1]),
        ("top_k", [-2, 2**31]),
        ("min_p", [-0.1, 1.1]),
        ("presence_penalty", [2.1, -2.1]),
        ("frequency_penalty", [2.1]),
        ("repetition_penalty", [0]),
        ("seed", [2**63, -(2**63) - 1, 10**30]),
        ("stop", [5, "", ["a", ""], ["a", 5], {}, "x" * 1025]),
        ("stop_token_ids", [5, [True], ["5"], [-1], [4096]]),
        ("allowed_token_ids", [[], [1.0], [4096]]),
        ("bad_words", ["x", [""], ["x" * 1025]]),
        ("logit_bias", [[], {"x": 1}, {"5": "1"}, {"4096": 1}, {"5": True}, {"-1": 1}]),
        ("min_tokens", [-1]),
        ("max_tokens", [-1, 2**31]),
        ("prompt_logprobs", [-2, -1, 21]),
        ("truncate_prompt_tokens", [0, -2, 2**31]),
        ("truncation_side", ["middle"]),
        ("stream_options", [{"include_usage": True}]),
    ],
)
def test_values_out_of_range_are_named(
    server: OpenAIServer, body_type: BodyType, field: str, values: list[Any]
) -> None:
    for value in values:
        error = refusal(server, body_type, **{field: value})
        assert error.param == field
        assert len(error.message) < 250


def test_min_tokens_above_max_tokens(server: OpenAIServer) -> None:
    assert refusal(server, CompletionBody, min_tokens=17).param == "min_tokens"
    assert params_of(server, ChatBody, min_tokens=17).min_tokens == 17


def test_max_completion_tokens_is_the_newer_name(server: OpenAIServer) -> None:
    assert params_of(server, ChatBody, max_completion_tokens=5).max_tokens == 5
    assert params_of(server, ChatBody, max_completion_tokens=5, max_tokens=5).max_tokens == 5
    assert params_of(server, ChatBody, max_completion_tokens=5, max_tokens=6).max_tokens == 5
    for value in (0, -1, 2**31):
        assert refusal(server, ChatBody, max_completion_tokens=value).param == "max_completion_tokens"


@pytest.mark.parametrize("body_type", [CompletionBody, ChatBody])
def test_biases_are_clipped(server: OpenAIServer, body_type: BodyType) -> None:
    params = params_of(server, body_type, logit_bias={"5": 1000, "6": -101.5, "7": 3})
    assert params.logit_bias == {5: 100, 6: -100, 7: 3}


@pytest.mark.parametrize("body_type", [CompletionBody, ChatBody])
def test_several_greedy_answers_are_refused(server: OpenAIServer, body_type: BodyType) -> None:
    assert refusal(server, body_type, n=2, temperature=0).param == "n"
    assert params_of(server, body_type, n=2, temperature=0, use_beam_search=True, max_tokens=2).n == 2


def test_length_penalty_without_beams_has_no_effect(server: OpenAIServer) -> None:
    assert params_of(server, CompletionBody, length_penalty=2.0) == SamplingParams(max_tokens=16)


def test_named_tokens_need_logprobs(server: OpenAIServer) -> None:
    for body_type, asked in ((CompletionBody, 5), (ChatBody, True)):
        assert refusal(server, body_type, logprob_token_ids=[5, 6]).param == "logprob_token_ids"
        params = params_of(server, body_type, logprob_token_ids=[5, 6], logprobs=asked)
        assert (params.logprob_token_ids, params.logprobs) == ((5, 6), 2)
        for wrong in ([4096], [-1], list(range(129))):
            assert refusal(server, body_type, logprob_token_ids=wrong, logprobs=asked).param == "logprob_token_ids"
        beams = {"use_beam_search": True, "logprob_token_ids": [5], "logprobs": asked}
        assert refusal(server, body_type, **beams).status == 400


def test_spaces_between_special_tokens_are_refused_where_they_could_matter(server: OpenAIServer) -> None:
    assert params_of(server, ChatBody, spaces_between_special_tokens=False) == SamplingParams(max_tokens=None)
    fields = {"spaces_between_special_tokens": False, "skip_special_tokens": False}
    error = refusal(server, ChatBody, **fields)
    assert (error.param, error.code) == ("spaces_between_special_tokens", "unsupported_parameter")


def test_logprobs_of_completions_are_a_number(server: OpenAIServer) -> None:
    assert params_of(server, CompletionBody, logprobs=0).logprobs == 0
    assert refusal(server, CompletionBody, logprobs=21).param == "logprobs"
    assert refusal(server, CompletionBody, logprobs=-1).param == "logprobs"


def test_logprobs_of_chats_are_a_switch_and_a_number(server: OpenAIServer) -> None:
    assert params_of(server, ChatBody, logprobs=False, top_logprobs=0).logprobs is None
    assert params_of(server, ChatBody, logprobs=True).logprobs == 0
    assert params_of(server, ChatBody, logprobs=True, top_logprobs=20).logprobs == 20
    for fields in ({"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1}, {"top_logprobs": 1}):
        error = refusal(server, ChatBody, **fields)
        assert error.param == "top_logprobs"
        assert error.message.startswith("top_logprobs ")


def test_echo_asks_for_the_logprobs_of_the_prompt(server: OpenAIServer) -> None:
    assert params_of(server, CompletionBody, echo=True, logprobs=2).prompt_logprobs == 2
    assert params_of(server, CompletionBody, echo=True, logprobs=2, prompt_logprobs=0).prompt_logprobs == 0
    assert params_of(server, CompletionBody, echo=True).prompt_logprobs is None
    assert params_of(server, CompletionBody, logprobs=2).prompt_logprobs is None


def test_no_tokens_only_with_echo(server: OpenAIServer) -> None:
    assert params_of(server, CompletionBody, echo=True, max_tokens=0).max_tokens == 1
    assert refusal(server, CompletionBody, max_tokens=0).param == "max_tokens"
    assert refusal(server, ChatBody, max_tokens=0).param == "max_tokens"


def test_best_of_more_than_is_returned_is_not_supported(server: OpenAIServer) -> None:
    for fields in ({"best_of": 1}, {"best_of": 3, "n": 3}, {"best_of": 1, "n": 3}):
        assert params_of(server, CompletionBody, **fields).n == fields.get("n", 1)
    error = refusal(server, CompletionBody, best_of=2)
    assert (error.param, error.code) == ("best_of", "unsupported_parameter")
