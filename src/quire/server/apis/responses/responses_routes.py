"""Route /v1/responses: the router, which only `quire.server.app` imports.

Checks run in order of their cost: fields first, then the room in the queue, then tokenizing.
"""

import time
import uuid
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.core.checks import refuse
from quire.engine.requests.input_processor import check_cache_salt
from quire.server.api.chat import ChatPrompt, prepare_chat, template_variables
from quire.server.api.generation import Generation
from quire.server.api.http_responses import create_response
from quire.server.api.preparation import (
    check_deadline,
    constrain,
    cut_header,
    deadline_field,
    deadlines_of,
    sampling_params,
)
from quire.server.api.request_bodies import read_body, request_body
from quire.server.apis.responses.input_items import added_tools, messages_of
from quire.server.apis.responses.responses_bodies import (
    ResponsesBody,
    check_context_edits,
    check_stateless,
    choice_of,
    functions_of,
    given_params,
)
from quire.server.apis.responses.responses_builder import ResponsesBuilder, ResponsesRequest
from quire.server.errors import renamed_fields
from quire.server.http.application import CLIENT_ID, KEY_NUMBER, received_s_of, record_of
from quire.server.service import Service
from quire.server.tools.served_formats import tool_use

router = APIRouter()

_STREAMS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}  # with stream: true
_FORMAT = "response_format"     # the field of chats that text.format is translated to
_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "logprobs": "top_logprobs",
    "prompt": "input",
    _FORMAT: "text.format",
    f"{_FORMAT}.type": "text.format.type",
    f"{_FORMAT}.schema": "text.format.schema",
    f"{_FORMAT}.json_schema": "text.format",
    f"{_FORMAT}.json_schema.name": "text.format.name",
    f"{_FORMAT}.json_schema.schema": "text.format.schema",
    f"{_FORMAT}.json_schema.strict": "text.format.strict",
}


@router.post("/v1/responses", openapi_extra=request_body(ResponsesBody), responses=_STREAMS)
async def create_model_response(request: Request) -> Response:
    """Answer input items with output items."""
    arrival_s = time.monotonic()
    service: Service = request.app.state.service
    body = await read_body(request, ResponsesBody)
    check_stateless(body)
    check_context_edits(body)
    session = None if body.session_id is None else request.app.state.sessions.named_by(request, body)
    with renamed_fields(_NAMES):
        call = _checked_request(request, service, body)
        conversation = _conversation(service, call)
        if session is not None:
            messages = request.app.state.sessions.messages_of(session, conversation.messages, "input")
            conversation = replace(conversation, messages=messages)
    record = record_of(request.scope)
    record.request_id, record.model, record.stream, record.num_prompts = call.id, call.model, call.stream, 1
    body.input = None       # the conversation has it by now
    with service.admit(1, param="input", client_id=call.client_id) as reservation, renamed_fields(_NAMES):
        check_deadline(service, call)
        await constrain(service, call, _constraint(body))
        shows_reasoning = body.include_reasoning is not False
        await prepare_chat(service, call, conversation, reservation, shows_reasoning=shows_reasoning)
        builder = ResponsesBuilder(call, service.client.tokenizer)
        generation = await Generation.start(service, call, record, arrival_s, reservation)
    headers = cut_header(body.max_output_tokens, call)
    return await create_response(request, service, generation, builder, headers)


def _checked_request(request: Request, service: Service, body: ResponsesBody) -> ResponsesRequest:
    """Check all fields of a body except its input."""
    tools = functions_of(body.tools, added_tools(body.input), service.options.max_tools)
    choice = choice_of(body.tool_choice)
    is_parallel = body.parallel_tool_calls is not False
    given = given_params(body) | deadlines_of(request, body)
    checked = service.client.inputs.check_params(sampling_params(service, given), is_own=True)
    return ResponsesRequest(
        id=f"resp_{uuid.uuid4().hex}",
        model=service.check_model(body.model),
        created=int(time.time()),
        checked=checked,
        received_s=received_s_of(request),
        deadline_field=deadline_field(body, checked.params),
        stream=bool(body.stream),
        cuts_max_tokens=True,
        cache_salt=check_cache_salt(body.cache_salt, service.options.max_salt_chars),
        key_number=request.scope[KEY_NUMBER],
        client_id=request.scope[CLIENT_ID],
        tools=tool_use(tools.functions, choice, is_parallel=is_parallel),
        names_tokens_by_id=service.options.return_tokens_as_token_ids,
        tells_times=service.options.enable_per_request_metrics,
        body=body,
        given_tools=tools,
    )


def _conversation(service: Service, call: ResponsesRequest) -> ChatPrompt:
    body = call.body
    effort = None if body.reasoning is None else body.reasoning.effort
    return ChatPrompt(
        messages=messages_of(
            body.instructions, body.input, service.options.max_messages, reads_images=service.images is not None
        ),
        tools=call.tools.tools,
        variables=template_variables(effort, body.chat_template_kwargs, param="reasoning.effort"),
        reads_images=service.images is not None,
    )


def _constraint(body: ResponsesBody) -> dict[str, Any]:
    """Return the constraint of the text in the form of chats."""
    given = None if body.text is None else body.text.format
    if given is None or given == {"type": "text"}:
        return {}
    if not isinstance(given, dict):
        refuse("text.format", given, "an object")
    if given.get("type") == "json_schema":
        return {_FORMAT: {"type": "json_schema", "json_schema": {k: v for k, v in given.items() if k != "type"}}}
    return {_FORMAT: given}
