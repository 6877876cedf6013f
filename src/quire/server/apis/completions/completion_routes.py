"""Routes /v1/completions and /v1/chat/completions, and the checked parameters of their bodies.

Checks run in order of their cost: fields first, then the room in the queue, then tokenizing. Nothing is queued before
all prompts are checked.

This module checks the bounds of the server; the parameters check their own ranges, and the input processor checks them
against the model. Parameters that a beam search does not support are refused by name.
"""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response

from quire.core.checks import check_float, check_int, check_optional_int, refuse, shown
from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import MAX_LENGTH_PENALTY, MAX_LOGIT_BIAS, MIN_SEED, BeamSearchParams, SamplingParams
from quire.core.sequence import KVTransfer
from quire.engine.requests.input_processor import CheckedParams, Truncation, check_cache_salt
from quire.server.api.chat import ChatPrompt, prepare_chat, template_variables
from quire.server.api.generation import Generation
from quire.server.api.http_responses import create_response
from quire.server.api.preparation import (
    check_deadline,
    check_priority_granted,
    constrain,
    deadline_field,
    deadlines_of,
    prepare,
    sampling_params,
)
from quire.server.api.request_bodies import MAX_HTTP_SEED, read_body, request_body
from quire.server.api.sessions import Session
from quire.server.apis.completions.chat_response import ChatResponseBuilder
from quire.server.apis.completions.completion_bodies import (
    MAX_HTTP_TEMPERATURE,
    ChatBody,
    ChatMessage,
    CompletionBody,
    ForkBody,
    GenerationBody,
    SessionExtendBody,
    TokenizeBody,
)
from quire.server.apis.completions.kv_transfer import params_of_answer, seed_of, transfer_of
from quire.server.apis.completions.openai_response import CompletionResponseBuilder, OpenAIRequest
from quire.server.errors import ApiError, invalid, raise_renamed, renamed_fields, unsupported
from quire.server.grammars.grammar_checker import CONSTRAINT_FIELDS
from quire.server.history import PastRequest
from quire.server.http.application import CLIENT_ID, KEY_NUMBER, RequestRecord, received_s_of, record_of
from quire.server.images.image_inputs import with_image_parts
from quire.server.options import Limits
from quire.server.service import AdmittedCall, Service
from quire.server.tools.served_formats import NO_TOOLS, ToolUse, tool_use
from quire.text.conversation import Message
from quire.text.tools import Tool

DEFAULT_COMPLETION_TOKENS = 16

# Parameters that a body gives as they are: all that it and SamplingParams name, but for those that are converted.
_SAME_NAMES = (GenerationBody.model_fields.keys() & {field.name for field in fields(SamplingParams)}) - {
    "max_tokens", "logit_bias", "structured_outputs", "ttft_deadline_ms", "deadline_ms"
}  # fmt: skip

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
    if body.kv_transfer_params and (seed := seed_of(body)) is not None:
        given["seed"] = seed
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
    if body.kv_transfer_params and body.kv_transfer_params.get("do_remote_decode") and body.min_tokens:
        given["min_tokens"] = min(body.min_tokens, given["max_tokens"] or body.min_tokens)   # routers set max_tokens 1
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


router = APIRouter()

Prompt = str | list[int]

_STREAMS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}  # with stream: true


@router.post("/v1/completions", openapi_extra=request_body(CompletionBody), responses=_STREAMS)
async def create_completion(request: Request) -> Response:
    """Continue one prompt or several."""
    arrival_s = time.monotonic()
    return await _complete(request, await read_body(request, CompletionBody), arrival_s)


@router.post(
    "/v1/requests/{request_id}/fork", tags=["requests"], openapi_extra=request_body(ForkBody), responses=_STREAMS
)
async def fork(
    request: Request, request_id: Annotated[str, Path(description="id of the request, as its answer has it")]
) -> Response:
    """Continue a running or finished request behind a token of its answer, as a completion of its own.

    The prompt of that completion is the request's prompt and the tokens before the fork, of the same model, adapter and
    salt, so it shares their KV blocks and takes one where it begins to write. The request itself goes on.
    """
    arrival_s = time.monotonic()
    service: Service = request.app.state.service
    body = await read_body(request, ForkBody)
    requests = service.history.find(request_id, request.scope[KEY_NUMBER])
    return await _complete(request, _completion_of_fork(service, requests, body), arrival_s)


def _completion_of_fork(service: Service, requests: Sequence[PastRequest], body: ForkBody) -> CompletionBody:
    """Return the body of the completion that continues one of a call's requests. Errors name the field."""
    past = requests[check_int("prompt_index", body.prompt_index or 0, 0, len(requests) - 1)]
    if past.has_images:
        raise ApiError(400, "a request with images cannot be forked: its images are not kept", param="request_id")
    index = check_int("index", body.index or 0, 0, past.num_branches - 1)
    num_tokens = len(past.branches.get(index, ()))
    at = num_tokens if body.at is None else check_int("at", body.at, 0, num_tokens)
    model, adapter = service.names[0], past.prompt.adapter
    if adapter is not None:
        model = adapter.name
        if service.adapter_of(model) != adapter:
            message = f"the adapter {shown(model)} of the request is no longer served as it was"
            raise ApiError(410, message, param="request_id", code="adapter_gone")
    own = {"model": model, "cache_salt": past.prompt.cache_salt}
    for name, value in own.items():
        if (asked := getattr(body, name)) not in (None, value):
            refuse(name, asked, "left out, or that of the request that is forked")
    given = {name: getattr(body, name) for name in body.model_fields_set - {"prompt_index", "index", "at"}}
    return CompletionBody.model_construct(**given | own, prompt=past.known_tokens(index, at))


async def _complete(request: Request, body: CompletionBody, arrival_s: float) -> Response:
    """Answer a completion that arrived at `arrival_s`."""
    service: Service = request.app.state.service
    session = None if body.session_id is None else request.app.state.sessions.named_by(request, body)
    call, record = _checked_request(request, service, body, "cmpl")
    prompts = [body.prompt] if session is not None and body.prompt in ("", []) else parse_prompts(body.prompt)
    check_num_choices(len(prompts), call.checked.params.n, service.options)
    if call.transfer is not None and len(prompts) > 1:
        invalid(f"kv_transfer_params is of one prompt, got {len(prompts)}", param="kv_transfer_params")
    record.num_prompts = len(prompts)
    with service.admit(len(prompts), client_id=call.client_id) as reservation:
        check_deadline(service, call)
        await constrain(service, call, constraint_fields(body))
        if session is None:
            await prepare_prompts(service, call, body, prompts)
        else:
            await _prepare_continued(service, call, session, prompts, reservation)
        body.prompt, prompts = None, []    # packed by now: each garbage collection would walk lists of them
        tokenizer = service.client.tokenizer
        if body.echo:
            num_tokens = sum(len(prepared.prompt.token_ids) for prepared in call.requests)
            echoing = partial(CompletionResponseBuilder, call, tokenizer, echo=True)    # decodes the prompts
            builder = await service.threads.run(num_tokens, echoing)
        else:
            builder = CompletionResponseBuilder(call, tokenizer, echo=False)
        if call.transfer is not None:
            note_transfer(service, call, call.transfer)
        generation = await Generation.start(service, call, record, arrival_s, reservation)
    del body    # a request that waits does not hold it
    return await create_response(request, service, generation, builder)


async def _prepare_continued(
    service: Service, call: OpenAIRequest, session: Session, prompts: list[Prompt], admitted: AdmittedCall
) -> None:
    """Add an engine request for each prompt of a call, behind the tokens of a session."""
    if call.checked.params.truncate_prompt_tokens is not None:
        invalid("truncate_prompt_tokens does not go with session_id", param="truncate_prompt_tokens")
    for image in session.prompt.images:
        admitted.reserve_image(len(image.prepared.pixels), "session_id")
    await prepare(service, call, partial(session.continued, service.client.inputs), prompts)


@router.post("/v1/chat/completions", openapi_extra=request_body(ChatBody), responses=_STREAMS)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    arrival_s = time.monotonic()
    service: Service = request.app.state.service
    body = await read_body(request, ChatBody)
    session = None if body.session_id is None else request.app.state.sessions.named_by(request, body)
    call, record = _checked_request(request, service, body, "chatcmpl")
    check_num_choices(1, call.checked.params.n, service.options)
    record.num_prompts = 1
    with service.admit(1, param="messages", client_id=call.client_id) as reservation:
        with renamed_fields(field_names(body)):
            check_deadline(service, call)
            await constrain(service, call, constraint_fields(body))
            conversation = replace(
                conversation_of(service, body, body.messages, call.tools.tools),
                truncation=truncation_of(service, call, body),
            )
            if session is not None:
                messages = request.app.state.sessions.messages_of(session, conversation.messages)
                conversation = replace(conversation, messages=messages)
            shows_reasoning = body.include_reasoning is not False
            await prepare_chat(service, call, conversation, reservation, shows_reasoning=shows_reasoning)
        builder = ChatResponseBuilder(call, service.client.tokenizer)
        if call.transfer is not None:
            note_transfer(service, call, call.transfer)
        generation = await Generation.start(service, call, record, arrival_s, reservation)
    del body, conversation
    return await create_response(request, service, generation, builder)


def _checked_request(
    request: Request, service: Service, body: CompletionBody | ChatBody, kind: str
) -> tuple[OpenAIRequest, RequestRecord]:
    """Check all fields of a body except its prompts; return the API request and the record of its log line."""
    record = record_of(request.scope)
    request_id, model = f"{kind}-{uuid.uuid4().hex}", service.check_model(body.model)
    record.request_id, record.model, record.stream = request_id, model, bool(body.stream)
    checked = checked_params(body, service, deadlines_of(request, body))
    if body.cache_salt is not None:
        check_cache_salt(body.cache_salt, service.options.max_salt_chars)
    key_number = request.scope[KEY_NUMBER]
    if checked.priority < 0:
        check_priority_granted(service, checked.priority, key_number)
    transfer = transfer_of(service, body, key_number) if body.kv_transfer_params else None
    call = OpenAIRequest(
        id=request_id, model=model, created=int(time.time()), checked=checked, stream=bool(body.stream),
        transfer=transfer,
        received_s=received_s_of(request), deadline_field=deadline_field(body, checked.params),
        hides_output=body.max_tokens == 0, cache_salt=body.cache_salt, key_number=key_number,
        client_id=request.scope[CLIENT_ID], body=body,
        always_includes_usage=service.options.enable_force_include_usage,
        names_tokens_by_id=service.options.return_tokens_as_token_ids,
        tells_times=service.options.enable_per_request_metrics,
        tools=_tool_use(body) if isinstance(body, ChatBody) else NO_TOOLS,
        max_reasoning_tokens=_max_reasoning_tokens(service, body) if isinstance(body, ChatBody) else None,
    )  # fmt: skip
    return call, record


def note_transfer(service: Service, call: OpenAIRequest, transfer: KVTransfer) -> None:
    """Give the engine request of a call its ticket, and the answer the field for the next engine."""
    request = call.requests[0].request
    request.transfer = transfer
    if request.is_kept:
        num_tokens = len(request.prompt_token_ids)
        call.kv_transfer_params = params_of_answer(service, transfer, num_tokens, request.seed)


def _max_reasoning_tokens(service: Service, body: ChatBody) -> int | None:
    """Return the limit on reasoning tokens of a body; None if the body has none, or -1."""
    budget = check_optional_int("thinking_token_budget", body.thinking_token_budget, -1)
    if budget in (None, -1):
        return None
    if not service.formats.bounds_reasoning:
        message = (
            f"thinking_token_budget {budget} needs a model that marks its reasoning with a special token at each end "
            "(see reasoning_parser)"
        )
        invalid(message, param="thinking_token_budget", code="unsupported_parameter")
    return budget


def _tool_use(body: ChatBody) -> ToolUse:
    if body.tools == []:
        invalid("tools must have at least one tool, or be left out, got a list of 0", param="tools")
    if body.tools is None and body.tool_choice not in (None, "none"):
        invalid(f"tool_choice {shown(body.tool_choice)} needs tools", param="tool_choice")
    is_parallel = body.parallel_tool_calls is not False
    return tool_use(body.tools, body.tool_choice, is_parallel=is_parallel)


def parse_prompts(prompt: Any) -> list[Prompt]:  # noqa: ANN401 (JSON)
    """Return the prompts of a body as a list. InvalidRequestError for anything that is neither text nor a list."""
    if isinstance(prompt, str):
        return [prompt]
    is_list = isinstance(prompt, list) and bool(prompt)
    is_token_ids = is_list and type(prompt[0]) is int
    if not is_list or not (is_token_ids or any(_all_are(kind, prompt) for kind in (str, list))):
        expected = "text, a list of token ids, or a list that is not empty, of texts or of lists of token ids"
        refuse("prompt", prompt, expected)
    return [prompt] if is_token_ids else prompt


def _all_are(kind: type, prompts: list[Any]) -> bool:
    return all(isinstance(prompt, kind) for prompt in prompts)


def check_num_choices(num_prompts: int, n: int, limits: Limits) -> None:
    """Raise ApiError 400 for more choices than one call may have."""
    most = limits.max_choices
    if num_prompts * n > most:
        message = f"{num_prompts} prompts with n {n}: a call may have at most {most} choices (max_choices)"
        invalid(message, param="prompt" if num_prompts > most else "n")


def constraint_fields(body: GenerationBody) -> dict[str, Any]:
    """Return the fields of a body that ask for a grammar."""
    if body.model_fields_set.isdisjoint(CONSTRAINT_FIELDS):
        return {}
    return {name: value for name in CONSTRAINT_FIELDS if (value := getattr(body, name)) is not None}


async def prepare_prompts(
    service: Service, call: OpenAIRequest, body: GenerationBody, prompts: list[Prompt]
) -> None:
    """Add an engine request for each prompt of a call. InvalidRequestError for the first invalid one."""
    tokenize = partial(
        service.client.inputs.tokenize, add_special_tokens=body.add_special_tokens is not False,
        truncation=truncation_of(service, call, body),
    )  # fmt: skip
    await prepare(service, call, tokenize, prompts)


def truncation_of(service: Service, call: OpenAIRequest, body: GenerationBody) -> Truncation | None:
    """Return the truncation of the prompts; from the left unless the body says otherwise, as in vLLM."""
    params = call.checked.params
    if params.truncate_prompt_tokens is None:
        return None
    return service.client.inputs.truncation_of(params, keeps_last=body.truncation_side != "right")


def conversation_of(
    service: Service, body: ChatBody | TokenizeBody | SessionExtendBody, messages: Sequence[ChatMessage],
    tools: Sequence[Tool],
) -> ChatPrompt:
    """Return the conversation of a body. InvalidRequestError for variables of the template that are fields."""
    given = [_as_message(message) for message in messages]
    reads_images = service.images is not None
    continues = bool(body.continue_final_message)
    begins = body.add_generation_prompt
    variables = template_variables(body.reasoning_effort, body.chat_template_kwargs)
    if isinstance(body, ChatBody) and body.documents is not None:
        variables |= {"documents": _checked_documents(body.documents)}
    return ChatPrompt(
        messages=with_image_parts(given, reads_images=reads_images),
        tools=tools,
        add_generation_prompt=not continues if begins is None else begins,
        continue_final_message=continues,
        variables=variables,
        adds_special_tokens=bool(body.add_special_tokens),
        reads_images=reads_images,
    )


def _checked_documents(documents: object) -> list[dict[str, Any]]:
    if not isinstance(documents, list) or not all(isinstance(document, dict) for document in documents):
        refuse("documents", documents, "a list of objects")
    return documents


def _as_message(message: ChatMessage) -> Message:
    """Return a message with the keys that were sent: a template may test whether a key is present."""
    named = {name: getattr(message, name) for name in ("role", "content") if name in message.model_fields_set}
    return named | (message.model_extra or {})
