"""Preparation of an API request: its grammar checked, its prompts tokenized, all but short ones off the event loop.

Nothing is queued before all prompts of a call are prepared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from quire.core.checks import refuse
from quire.core.owner_labels import OPERATOR
from quire.core.prompt_scores import width_of
from quire.core.sampling_params import SamplingParams
from quire.engine.requests.input_processor import TokenizedPrompt
from quire.server.api.api_request import ApiRequest
from quire.server.api.call_deadlines import check_deadline
from quire.server.errors import invalid
from quire.server.options import Limits
from quire.server.service import Service

SHORT_CHARS = 512   # longest prompt tokenized at once: at most 0.7 ms, on 2 cores of an AMD EPYC (Zen 4)


def sampling_params(
    service: Service, given: Mapping[str, object], *, is_beam_search: bool = False
) -> SamplingParams:
    """Return the parameters that a body asks for, with the model's defaults for those that it leaves out.

    Of the defaults a beam search has the temperature alone; the input processor bounds an answer without max_tokens.
    InvalidRequestError for a value or text past its bounds.
    """
    sampling, most = service.client.inputs.sampling, service.options.max_stop_chars
    names = {"temperature"} if is_beam_search else sampling.params.keys() - {"max_tokens"}
    defaults = {name: value for name, value in sampling.params.items() if name in names}
    params = SamplingParams(**(defaults | dict(given)))  # type: ignore[arg-type]
    if (longest := sampling.max_output_tokens) is not None and params.max_tokens is not None:
        params = replace(params, max_tokens=min(params.max_tokens, longest), min_tokens=min(params.min_tokens, longest))
    for field in ("stop", "bad_words"):
        for text in getattr(params, field) or ():
            if len(text) > most:
                refuse(field, text, f"texts of at most {most} characters (max_stop_chars)")
    return params


async def constrain(service: Service, call: ApiRequest, fields: Mapping[str, Any]) -> None:
    """Add the grammar that a call's CONSTRAINT_FIELDS ask for. Raises as `GrammarChecker.check`."""
    if not fields or fields == {"response_format": {"type": "text"}}:
        return
    name = next(iter(fields))
    params = await service.grammars.check(fields, call.client_id)
    if params is None:
        return
    checked = call.checked
    if checked.beam is not None and checked.params.ignore_eos:
        reason = "beams with a complete output end by an end-of-sequence token"
        invalid(f"ignore_eos must be false in a beam search with {name}: {reason}", param="ignore_eos")
    whole = replace(checked.params, structured_outputs=params)
    call.checked = service.client.inputs.check_params(whole, checked.beam, checked.priority, is_own=True)
    call.constraint_field = name


async def prepare(
    service: Service, call: ApiRequest, tokenize: Callable[[Any], TokenizedPrompt], prompts: Sequence[Any]
) -> None:
    """Add an engine request for each prompt of a call: all are tokenized, and their sum is checked, before.

    A prompt that is too long for the model is reported before the sum: clients look for that error and shorten it.
    """
    num_chars = sum(map(len, prompts))
    if set(map(type, prompts)) == {str}:
        check_deadline(service, call, num_chars)
    if len(prompts) == 1 and num_chars <= SHORT_CHARS and not call.checked.params.bad_words:
        _prepare(service, call, tokenize, prompts)
    else:
        work = partial(_prepare, service, call, tokenize, prompts)
        await service.threads.run(num_chars, work, call.client_id)


def _prepare(
    service: Service, call: ApiRequest, tokenize: Callable[[Any], TokenizedPrompt], prompts: Sequence[Any]
) -> None:
    limits, params, checked = service.client.inputs.limits, call.checked.params, call.checked
    tokenized: list[TokenizedPrompt] = []
    num_tokens = 0
    for prompt in prompts:
        adapter = service.adapter_of(call.model)
        tokens = tokenize(prompt)._replace(cache_salt=call.cache_salt, key_number=call.key_number, adapter=adapter)
        tokenized.append(tokens)
        if call.cuts_max_tokens and 0 < (most := limits.most_tokens(len(tokens.token_ids), params.n)) < (
            params.max_tokens or 0
        ):
            params = replace(params, max_tokens=most)
            checked = service.client.inputs.check_params(params, checked.beam, checked.priority, is_own=True)
        limits.check_admissible(len(tokens.token_ids), params.max_tokens or 1, params.n)
        num_tokens += len(tokens.token_ids)
        _check_total(num_tokens, params, service.options)
    weight = service.options.weight_of(call.key_number)
    requests = []
    for prompt in tokenized:
        requests.append(service.client.prepare(prompt, checked, call.client_id, weight))  # noqa: PERF401 (a call less)
    if call.reading is not None:
        kept = service.formats.kept_token_ids
        reasoning = call.reading.reasoning
        requests = [request._replace(kept_token_ids=kept, reasoning=reasoning) for request in requests]
    call.requests, call.checked = requests, checked


def cut_header(asked: int | None, call: ApiRequest) -> dict[str, str]:
    """Return the header that names the maximum of output tokens if it is lower than the client asked for."""
    most = call.checked.params.max_tokens
    return {} if asked is None or most is None or most >= asked else {"X-Max-Output-Tokens": str(most)}


def _check_total(num_tokens: int, params: SamplingParams, limits: Limits) -> None:
    if num_tokens > limits.max_call_tokens:
        most = limits.max_call_tokens
        invalid(f"the prompts of one call may have at most {most} tokens together (max_call_tokens)", param="prompt")
    if params.prompt_logprobs is None and params.prompt_logprob_token_ids is None:
        return
    num_listed = 0 if params.prompt_logprobs is None else params.prompt_logprobs + 1
    num_each = num_listed + width_of(params.prompt_logprob_token_ids)
    num_logprobs = num_tokens * num_each * params.n
    if num_logprobs > limits.max_prompt_candidates:
        invalid(
            f"{num_tokens} prompt tokens with {num_each} logprobs each and n {params.n} come to "
            f"{num_logprobs} logprobs: one call may have at most {limits.max_prompt_candidates} "
            f"(max_prompt_candidates)",
            param="prompt_logprobs" if num_listed else "prompt_logprob_token_ids",
        )


def check_priority_granted(service: Service, priority: int, key_number: int) -> None:
    """Raise ApiError 400 for a priority below 0 without the right to it."""
    if priority < 0 and key_number != OPERATOR and not service.options.allow_client_priority:
        message = (
            f"priority must be 0 or more, got {priority}: below 0 it needs the operator's key (operator_api_key), or a "
            f"server that grants it to all clients (allow_client_priority)"
        )
        invalid(message, param="priority", code="unsupported_parameter")
