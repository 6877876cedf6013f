"""Checked parameters of a body: `SamplingParams`, `BeamSearchParams` and priority, for all routes, before tokenizing.

This module checks the bounds of the server; the parameters check their own ranges, and the input processor checks them
against the model. Parameters that a beam search does not support are refused by name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from quire.core.beam_search_params import BeamSearchParams
from quire.core.checks import check_int, check_optional_int, shown
from quire.core.sampling_params import SamplingParams
from quire.engine.input_processor import CheckedParams
from quire.server.api.preparation import sampling_params
from quire.server.errors import invalid, renamed_fields, unsupported
from quire.server.openai.request_models import ChatBody, CompletionBody, GenerationBody
from quire.server.service import Service

DEFAULT_COMPLETION_TOKENS = 16

_SAME_NAMES = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "prompt_logprobs", "logit_bias", "allowed_token_ids",
    "bad_words", "include_stop_str_in_output", "skip_special_tokens",
)

# Of SamplingParams: those that a beam search uses; those of detokenizing, and the seed, which it does not need.
_USED_BY_BEAMS = ("n", "temperature", "max_tokens", "ignore_eos")
_HARMLESS_TO_BEAMS = ("seed", "include_stop_str_in_output", "skip_special_tokens", "detokenize")


def checked_params(body: CompletionBody | ChatBody, service: Service) -> CheckedParams:
    """Return the parameters of a call, checked against everything but its prompts.

    InvalidRequestError or ApiError 400 names the invalid field.
    """
    given = {name: value for name in _SAME_NAMES if (value := getattr(body, name)) is not None}
    check_int("n", given.get("n", 1), 1, service.options.max_n)
    if body.stream_options is not None and not body.stream:
        invalid("stream_options is only allowed when stream is true", param="stream_options")
    given |= _completion_params(body) if isinstance(body, CompletionBody) else _chat_params(body)
    params = sampling_params(service, given, is_beam_search=bool(body.use_beam_search))
    with field_names(body):
        return service.client.inputs.check_params(params, _beam_search_params(body, params), body.priority or 0)


def _beam_search_params(body: CompletionBody | ChatBody, params: SamplingParams) -> BeamSearchParams | None:
    """Return the beam search of a call, or None. `params` are the sampling parameters of its body."""
    length_penalty = 1.0 if body.length_penalty is None else body.length_penalty
    if not body.use_beam_search:
        if length_penalty != 1:
            invalid("length_penalty is only allowed when use_beam_search is true", param="length_penalty")
        return None
    for name, value in _unsupported_by_beams(body, params):
        invalid(f"{name} {shown(value)} is not allowed when use_beam_search is true", param=name)
    return BeamSearchParams(params.n, params.max_tokens, params.ignore_eos, params.temperature, length_penalty)


@contextmanager
def field_names(body: GenerationBody) -> Iterator[None]:
    """Rename the parameters of errors to the fields of the body that the client used."""
    names = {"beam_width": "n"}
    if isinstance(body, ChatBody):
        names |= {"prompt": "messages", "logprobs": "top_logprobs"}
        names |= {} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
    with renamed_fields(names):
        yield


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
    params: dict[str, object] = {"max_tokens": max_tokens, "logprobs": body.logprobs}
    if body.echo and body.prompt_logprobs is None:
        params["prompt_logprobs"] = body.logprobs
    return params


def _chat_params(body: ChatBody) -> dict[str, object]:
    """Return the parameters that chats alone have, by default as many tokens as the context allows."""
    max_tokens = check_optional_int("max_tokens", body.max_tokens, 1)
    max_completion_tokens = check_optional_int("max_completion_tokens", body.max_completion_tokens, 1)
    if max_completion_tokens is not None and max_tokens not in (None, max_completion_tokens):
        message = f"max_tokens is {max_tokens} and max_completion_tokens is {max_completion_tokens}: give one of them"
        invalid(message, param="max_tokens")
    top_logprobs = check_optional_int("top_logprobs", body.top_logprobs, 0)
    if top_logprobs and not body.logprobs:
        invalid("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    logprobs = (top_logprobs or 0) if body.logprobs else None
    return {"max_tokens": max_completion_tokens or max_tokens, "logprobs": logprobs}


def _unsupported_by_beams(body: CompletionBody | ChatBody, params: SamplingParams) -> Iterator[tuple[str, object]]:
    """Yield each field, with its value, that a beam search does not support."""
    if body.stream:
        yield "stream", body.stream
    if isinstance(body, CompletionBody) and body.best_of not in (None, params.n):
        yield "best_of", body.best_of
    for field in fields(SamplingParams):
        value = getattr(params, field.name)
        is_default = value == field.default or value in ((), {})
        if not is_default and field.name not in _USED_BY_BEAMS + _HARMLESS_TO_BEAMS:
            yield field.name, value
