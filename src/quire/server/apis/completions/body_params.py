"""Checked parameters of a body: `SamplingParams`, `BeamSearchParams` and priority, for all routes, before tokenizing.

This module checks the bounds of the server; the parameters check their own ranges, and the input processor checks them
against the model. Parameters that a beam search does not support are refused by name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields

from quire.core.beam_search_params import MAX_LENGTH_PENALTY, BeamSearchParams
from quire.core.checks import check_float, check_int, check_optional_int, refuse, shown
from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import MAX_LOGIT_BIAS, MIN_SEED, SamplingParams
from quire.engine.requests.input_processor import CheckedParams
from quire.server.api.preparation import sampling_params
from quire.server.api.request_bodies import MAX_HTTP_SEED
from quire.server.apis.completions.completion_bodies import (
    MAX_HTTP_TEMPERATURE,
    ChatBody,
    CompletionBody,
    GenerationBody,
)
from quire.server.errors import invalid, raise_renamed, unsupported
from quire.server.service import Service

DEFAULT_COMPLETION_TOKENS = 16

_SAME_NAMES = frozenset((
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "prompt_logprobs", "prompt_logprob_token_ids",
    "prompt_logprob_start", "logprob_token_ids",
    "allowed_token_ids", "bad_words", "truncate_prompt_tokens", "include_stop_str_in_output", "skip_special_tokens",
    "repetition_detection",
))

# Fields of SamplingParams that a beam search uses, and those that it may be given without need.
_USED_BY_BEAMS = ("n", "temperature", "max_tokens", "ignore_eos", "ttft_deadline_ms", "deadline_ms")
_HARMLESS_TO_BEAMS = (
    "truncate_prompt_tokens", "seed", "include_stop_str_in_output", "skip_special_tokens", "detokenize"
)


def checked_params(
    body: CompletionBody | ChatBody, service: Service, deadlines: Mapping[str, object]
) -> CheckedParams:
    """Return the parameters of a call, checked against everything but its prompts. `deadlines`: those of the call.

    InvalidRequestError or ApiError 400 names the invalid field.
    """
    names = _SAME_NAMES & body.model_fields_set
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    if "n" in given:
        check_int("n", given["n"], 1, service.options.max_n)
    if body.stream_options is not None and not body.stream:
        invalid("stream_options is only allowed when stream is true", param="stream_options")
    _check_as_vllm(body)
    if body.logprob_token_ids:
        _check_replaced_logprobs(body, service.client.inputs.max_logprobs)
    if body.logit_bias is not None:
        given["logit_bias"] = _clipped(body.logit_bias)
    given |= deadlines
    given |= _completion_params(body) if isinstance(body, CompletionBody) else _chat_params(body)
    params = sampling_params(service, given, is_beam_search=bool(body.use_beam_search))
    try:
        beam = _beam_search_params(body, params)
        return service.client.inputs.check_params(params, beam, body.priority or 0, is_own=True)
    except InvalidRequestError as error:
        raise_renamed(error, field_names(body))


def _beam_search_params(body: CompletionBody | ChatBody, params: SamplingParams) -> BeamSearchParams | None:
    """Return the beam search of a call, or None. `params` are the sampling parameters of its body."""
    length_penalty = 1.0
    if body.length_penalty is not None:
        length_penalty = check_float(
            "length_penalty", body.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
        )
    if not body.use_beam_search:
        return None
    for name, value in _unsupported_by_beams(body, params):
        invalid(f"{name} {shown(value)} is not allowed when use_beam_search is true", param=name)
    return BeamSearchParams(params.n, params.max_tokens, params.ignore_eos, params.temperature, length_penalty)


def _check_as_vllm(body: CompletionBody | ChatBody) -> None:
    """Raise ApiError or InvalidRequestError for values that Python accepts and vLLM's server refuses."""
    if body.temperature is not None:
        check_float("temperature", body.temperature, 0.0, MAX_HTTP_TEMPERATURE)
    if body.seed is not None:
        check_int("seed", body.seed, MIN_SEED, MAX_HTTP_SEED)
    if body.temperature == 0 and (body.n or 1) > 1 and not body.use_beam_search:
        invalid(f"n must be 1 when temperature is 0: all answers would be the same, got {body.n}", param="n")
    if body.truncation_side not in (None, "left", "right"):
        refuse("truncation_side", body.truncation_side, "left or right")
    if body.spaces_between_special_tokens is False and body.skip_special_tokens is False:
        unsupported("spaces_between_special_tokens", value=False)


def _check_replaced_logprobs(body: CompletionBody | ChatBody, most: int) -> None:
    """Check the number of logprobs that logprob_token_ids replaces. ApiError 400 if no logprobs are asked for."""
    if body.logprobs is None or body.logprobs is False:
        expected = "given" if isinstance(body, CompletionBody) else "true"
        invalid(f"logprob_token_ids is only allowed when logprobs is {expected}", param="logprob_token_ids")
    if isinstance(body, CompletionBody):
        check_int("logprobs", body.logprobs, -1, most)
    elif body.top_logprobs is not None:
        check_int("top_logprobs", body.top_logprobs, -1, most)


def _clipped(bias: object) -> object:
    """Return a bias with its numbers clipped to the range; anything else is left to be refused."""
    if not isinstance(bias, dict):
        return bias
    return {
        key: min(MAX_LOGIT_BIAS, max(-MAX_LOGIT_BIAS, value)) if type(value) in (int, float) else value
        for key, value in bias.items()
    }


def field_names(body: GenerationBody) -> dict[str, str]:
    """Return the fields of the body that the client used, by the parameters that errors name."""
    names = {"beam_width": "n"}
    if isinstance(body, ChatBody):
        names |= {"prompt": "messages", "logprobs": "top_logprobs"}
        names |= {} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
    return names


def _completion_params(body: CompletionBody) -> dict[str, object]:
    """Return the parameters that completions alone have, by default 16 tokens.

    With `echo`, `logprobs` includes the prompt's, and `max_tokens` may be 0: the engine generates one token, which is
    left out of the response.
    """
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if body.best_of not in (None, 1, body.n):
        unsupported("best_of", body.best_of)
    if max_tokens == 0 and body.echo:
        max_tokens = 1
    elif max_tokens == 0:
        invalid("max_tokens must be at least 1 unless echo is true, got 0", param="max_tokens")
    logprobs = None if body.logprob_token_ids else body.logprobs
    params: dict[str, object] = {"max_tokens": max_tokens, "logprobs": logprobs}
    if body.echo and body.prompt_logprobs is None:
        params["prompt_logprobs"] = body.logprobs
    return params


def _chat_params(body: ChatBody) -> dict[str, object]:
    """Return the parameters that chats alone have, by default as many tokens as the context allows."""
    max_tokens = check_optional_int("max_tokens", body.max_tokens, 1)
    max_completion_tokens = check_optional_int("max_completion_tokens", body.max_completion_tokens, 1)
    top_logprobs = check_optional_int("top_logprobs", body.top_logprobs, -1)
    if top_logprobs and not body.logprobs:
        invalid("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    logprobs = (top_logprobs or 0) if body.logprobs and not body.logprob_token_ids else None
    return {"max_tokens": max_completion_tokens or max_tokens, "logprobs": logprobs}


def _unsupported_by_beams(body: CompletionBody | ChatBody, params: SamplingParams) -> Iterator[tuple[str, object]]:
    """Yield each field, with its value, that a beam search does not support."""
    if body.stream:
        yield "stream", body.stream
    if isinstance(body, CompletionBody) and body.best_of not in (None, params.n):
        yield "best_of", body.best_of
    if isinstance(body, ChatBody) and body.thinking_token_budget not in (None, -1):
        yield "thinking_token_budget", body.thinking_token_budget
    for field in fields(SamplingParams):
        value = getattr(params, field.name)
        is_default = value == field.default or value in ((), {})
        if not is_default and field.name not in _USED_BY_BEAMS + _HARMLESS_TO_BEAMS:
            yield field.name, value
