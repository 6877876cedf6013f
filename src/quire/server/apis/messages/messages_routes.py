"""Routes of Anthropic's Messages API: /v1/messages, and /v1/messages/count_tokens."""

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.core.errors import ContextLengthError, InvalidRequestError
from quire.engine.requests.image_prompts import NumberedImage
from quire.server.api.chat import ChatPrompt, numbered_images, prepare_chat, rendered, template_variables
from quire.server.api.generation import Generation
from quire.server.api.http_responses import create_response, json_response
from quire.server.api.preparation import (
    check_deadline,
    constrain,
    cut_header,
    deadline_field,
    deadlines_of,
    sampling_params,
)
from quire.server.api.request_bodies import read_body, request_body
from quire.server.apis.messages.cache_control import CachedPrefixes, cut_conversation, last_mark
from quire.server.apis.messages.message_builder import MessageBuilder, MessagesRequest
from quire.server.apis.messages.messages_bodies import ERRORS, ConversationBody, MessagesBody
from quire.server.apis.messages.openai_conversion import (
    check_context_edits,
    continues,
    deferred_tools,
    openai_messages,
    openai_tool_choice,
    openai_tools,
    shows_thinking,
    system_blocks,
    thinking_budget,
    thinking_effort,
)
from quire.server.errors import ApiError, invalid
from quire.server.http.application import CLIENT_ID, KEY_NUMBER, received_s_of, record_of
from quire.server.options import MAX_ELEMENTS
from quire.server.service import Service
from quire.server.tools.served_formats import ToolUse, tool_use

PATH = "/v1/messages"

router = APIRouter(tags=["messages"], responses=ERRORS)

_STREAMS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}  # with stream: true
_NAMES = {
    "response_format": "output_config.format", "stop": "stop_sequences", "prompt": "messages",
}  # fmt: skip


@router.post(PATH, openapi_extra=request_body(MessagesBody), responses=_STREAMS)
async def create_message(request: Request) -> Response:
    """Answer a conversation."""
    arrival_s, service = time.monotonic(), _service(request)
    body = await read_body(request, MessagesBody)
    record = record_of(request.scope)
    record.request_id, record.model = f"msg_{uuid.uuid4().hex}", service.check_model(body.model)
    record.stream, record.num_prompts = bool(body.stream), 1
    mark = last_mark(body)
    check_context_edits(body)
    with _anthropic_names():
        params = sampling_params(service, _sampling(request, body, service))
        checked = service.client.inputs.check_params(params, is_own=True)
        call = MessagesRequest(
            id=record.request_id, model=record.model, created=int(time.time()),
            checked=checked, received_s=received_s_of(request), deadline_field=deadline_field(body, checked.params),
            stream=record.stream, hides_output=body.max_tokens == 0, key_number=request.scope[KEY_NUMBER],
            client_id=request.scope[CLIENT_ID], tools=_tool_use(body), cuts_max_tokens=True,
            max_reasoning_tokens=_max_reasoning_tokens(body, service),
            manages_context=body.context_management is not None,
        )  # fmt: skip
        with service.admit(1, param="messages", client_id=call.client_id) as reservation:
            check_deadline(service, call)
            await constrain(service, call, _constraints(body))
            conversation = await _conversation(body, service, call.tools, call.client_id)
            await prepare_chat(service, call, conversation, reservation, shows_reasoning=shows_thinking(body))
            if mark is not None and service.options.max_pinned_prefixes:
                cut = await service.threads.run(
                    len(body.messages), partial(cut_conversation, body, mark, conversation), call.client_id
                )
                prefixes: CachedPrefixes = request.app.state.cached_prefixes
                call.cache = await prefixes.use(request, service, call, conversation, cut, mark.ttl_s)
            builder = MessageBuilder(call, service.client.tokenizer)
            generation = await Generation.start(service, call, record, arrival_s, reservation)
    return await create_response(request, service, generation, builder, cut_header(body.max_tokens, call))


@router.post(f"{PATH}/count_tokens", openapi_extra=request_body(ConversationBody))
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation's prompt: those that a message for it is charged for."""
    service, client_id = _service(request), request.scope[CLIENT_ID]
    body = await read_body(request, ConversationBody)
    service.check_model(body.model)
    last_mark(body)
    check_context_edits(body)
    with _anthropic_names():
        conversation = await _conversation(body, service, _tool_use(body), client_id)
        text, images = await rendered(service, conversation, client_id)
        with ExitStack() as holding:
            numbered: Sequence[NumberedImage] = ()
            if images:
                admitted = holding.enter_context(service.admit(1, param="messages", client_id=client_id))
                numbered = await numbered_images(service, images, admitted, client_id)

            def count() -> int:
                return len(service.client.inputs.tokenize_rendered(text, images=numbered).token_ids)

            return json_response({"input_tokens": await service.threads.run(len(text), count, client_id)})


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _sampling(request: Request, body: MessagesBody, service: Service) -> dict[str, object]:
    """Return the sampling parameters of a body. `max_tokens` 0 fills the cache: the engine generates one token."""
    most = getattr(service.options, MAX_ELEMENTS["stop"])
    if isinstance(body.stop_sequences, list) and len(body.stop_sequences) > most:
        message = f"stop_sequences must have at most {most} texts ({MAX_ELEMENTS['stop']})"
        invalid(message, param="stop_sequences")
    if body.max_tokens < 0:
        invalid(f"max_tokens must be at least 0, got {body.max_tokens}", param="max_tokens")
    given = {"stop": body.stop_sequences, "max_tokens": max(1, body.max_tokens)}
    given |= {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
    return {name: value for name, value in given.items() if value is not None} | deadlines_of(request, body)


def _constraints(body: MessagesBody) -> dict[str, object]:
    """Return the constraint that the form of the answer is."""
    field, given = "output_config.format", None if body.output_config is None else body.output_config.format
    if given is None:
        field, given = "output_format", body.output_format
    if given is None:
        return {}
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        expected = '{"type": "json_schema", "schema": {...}}'
        invalid(f"{field} must be {expected}", param=field)
    named = {"name": "output", "schema": given["schema"], "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _tool_use(body: ConversationBody) -> ToolUse:
    choice, is_parallel = openai_tool_choice(body.tool_choice)
    return tool_use(openai_tools(body.tools), choice, is_parallel=is_parallel)


def _max_reasoning_tokens(body: ConversationBody, service: Service) -> int | None:
    """Return the limit on reasoning tokens; None also for a model that cannot have one."""
    budget = thinking_budget(body)
    return budget if service.formats.bounds_reasoning else None


async def _conversation(body: ConversationBody, service: Service, use: ToolUse, client_id: str) -> ChatPrompt:
    """Return the conversation of a body, converted in a thread. ApiError 400 names an invalid block."""

    def convert() -> ChatPrompt:
        deferred = deferred_tools(body.tools)
        messages = openai_messages(
            system_blocks(body.system), body.messages, deferred, reads_images=service.images is not None
        )
        is_continued = continues(messages)
        variables = template_variables(thinking_effort(body), None, param="output_config.effort")
        return ChatPrompt(
            messages=messages, variables=variables,
            tools=[tool for tool in use.tools if tool["function"]["name"] not in deferred],
            add_generation_prompt=not is_continued, continue_final_message=is_continued,
            reads_images=service.images is not None,
        )  # fmt: skip

    return await service.threads.run(len(body.messages), convert, client_id)


@contextmanager
def _anthropic_names() -> Iterator[None]:
    """Name the fields of Anthropic's bodies in errors."""
    try:
        yield
    except (InvalidRequestError, ApiError) as error:
        if isinstance(error, ApiError) and error.status != 400:
            raise
        text = str(error).replace(".function.parameters", ".input_schema").replace(".function.", ".")
        name = _NAMES.get(error.param or "", error.param)
        if text.startswith(f"{error.param} ") and name is not None:
            text = name + text.removeprefix(str(error.param))
        if isinstance(error, ContextLengthError) and error.excess is not None:
            # Anthropic's words, by which Claude Code knows that it has to compact its session.
            text = "prompt is too long: {} tokens > {} maximum".format(*error.excess)
        raise ApiError(400, text, param=name, code=error.code) from error
