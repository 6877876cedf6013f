"""Routes of generation in OpenAI's dialect: /v1/completions and /v1/chat/completions.

Checks run in order of their cost: fields first, then the room in the queue, then tokenizing. Nothing is queued before
all prompts are checked.
"""

import time
import uuid
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.core.checks import check_optional_int, shown
from quire.engine.requests.input_processor import check_cache_salt
from quire.server.api.bodies import request_body
from quire.server.api.call_deadlines import check_deadline, deadline_field, deadlines_of
from quire.server.api.chat import prepare_chat
from quire.server.api.generation import Generation
from quire.server.api.http_responses import create_response
from quire.server.api.preparation import check_priority_granted, constrain
from quire.server.api.request_parsing import read_body
from quire.server.apis.completions.body_params import checked_params, field_names
from quire.server.apis.completions.body_prompts import (
    check_num_choices,
    constraint_fields,
    conversation_of,
    parse_prompts,
    prepare_prompts,
    truncation_of,
)
from quire.server.apis.completions.chat_response import ChatResponseBuilder
from quire.server.apis.completions.completion_bodies import ChatBody, CompletionBody
from quire.server.apis.completions.completion_response import CompletionResponseBuilder
from quire.server.apis.completions.openai_response import OpenAIRequest
from quire.server.errors import invalid
from quire.server.http.api_keys import client_id_of, key_number_of
from quire.server.http.request_body import received_s_of
from quire.server.http.request_log import RequestRecord, record_of
from quire.server.service import Service
from quire.server.tools.tool_use import NO_TOOLS, ToolUse, tool_use

router = APIRouter()

_STREAMS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}  # with stream: true


@router.post("/v1/completions", openapi_extra=request_body(CompletionBody), responses=_STREAMS)
async def create_completion(request: Request) -> Response:
    """Continue one prompt or several."""
    arrival_s, service = time.monotonic(), _service(request)
    body = await read_body(request, CompletionBody)
    call, record = _checked_request(request, service, body, "cmpl")
    prompts = parse_prompts(body.prompt)
    check_num_choices(len(prompts), call.params.n, service.options)
    record.num_prompts = len(prompts)
    with service.admit(len(prompts), client_id=call.client_id) as reservation:
        check_deadline(service, call)
        await constrain(service, call, constraint_fields(body))
        await prepare_prompts(service, call, prompts)
        body.prompt, prompts = None, []    # packed by now: each garbage collection would walk lists of them
        builder = await _completion_builder(service, call, echo=bool(body.echo))
        generation = await Generation.start(service, call, record, arrival_s, reservation)
    return await create_response(request, service, generation, builder)


@router.post("/v1/chat/completions", openapi_extra=request_body(ChatBody), responses=_STREAMS)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    arrival_s, service = time.monotonic(), _service(request)
    body = await read_body(request, ChatBody)
    call, record = _checked_request(request, service, body, "chatcmpl")
    check_num_choices(1, call.params.n, service.options)
    record.num_prompts = 1
    with service.admit(1, param="messages", client_id=call.client_id) as reservation:
        with field_names(body):
            check_deadline(service, call)
            await constrain(service, call, constraint_fields(body))
            conversation = replace(
                conversation_of(body, body.messages, call.tools.tools), truncation=truncation_of(service, call)
            )
            shows_reasoning = body.include_reasoning is not False
            await prepare_chat(service, call, conversation, shows_reasoning=shows_reasoning)
        builder = ChatResponseBuilder(call, service.client.tokenizer)
        generation = await Generation.start(service, call, record, arrival_s, reservation)
    return await create_response(request, service, generation, builder)


async def _completion_builder(service: Service, call: OpenAIRequest, *, echo: bool) -> CompletionResponseBuilder:
    """Return the builder of a completion; with `echo` it decodes the prompts, in a thread."""
    tokenizer = service.client.tokenizer
    if not echo:
        return CompletionResponseBuilder(call, tokenizer, echo=False)
    num_tokens = sum(len(request.prompt.token_ids) for request in call.requests)
    return await service.threads.run(num_tokens, lambda: CompletionResponseBuilder(call, tokenizer, echo=True))


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _checked_request(
    request: Request, service: Service, body: CompletionBody | ChatBody, kind: str
) -> tuple[OpenAIRequest, RequestRecord]:
    """Check all fields of a body except its prompts; return the API request and the record of its log line."""
    record = record_of(request.scope)
    request_id, model = f"{kind}-{uuid.uuid4().hex}", service.check_model(body.model)
    record.request_id, record.model, record.stream = request_id, model, bool(body.stream)
    checked = checked_params(body, service, deadlines_of(request, body))
    check_cache_salt(body.cache_salt, service.options.max_salt_chars)
    key_number = key_number_of(request)
    check_priority_granted(service, checked.priority, key_number)
    call = OpenAIRequest(
        id=request_id, model=model, created=int(time.time()), checked=checked, stream=bool(body.stream),
        received_s=received_s_of(request), deadline_field=deadline_field(body, checked.params),
        hides_output=body.max_tokens == 0, cache_salt=body.cache_salt, key_number=key_number,
        client_id=client_id_of(request.scope), body=body,
        always_includes_usage=service.options.enable_force_include_usage,
        names_tokens_by_id=service.options.return_tokens_as_token_ids,
        tells_times=service.options.enable_per_request_metrics,
        tools=_tool_use(body) if isinstance(body, ChatBody) else NO_TOOLS,
        max_reasoning_tokens=_max_reasoning_tokens(service, body) if isinstance(body, ChatBody) else None,
    )  # fmt: skip
    return call, record


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
