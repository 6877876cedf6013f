"""Routes of generation in OpenAI's dialect: /v1/completions and /v1/chat/completions.

Checks run in order of their cost: fields first, then the room in the queue, then tokenizing. Nothing is queued before
all prompts are checked.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.core.checks import check_optional_int, refuse, shown
from quire.engine.requests.input_processor import Truncation, check_cache_salt
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
)
from quire.server.api.request_bodies import read_body, request_body
from quire.server.apis.completions.body_params import checked_params, field_names
from quire.server.apis.completions.chat_response import ChatResponseBuilder
from quire.server.apis.completions.completion_bodies import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerationBody,
    TokenizeBody,
)
from quire.server.apis.completions.completion_response import CompletionResponseBuilder
from quire.server.apis.completions.openai_response import OpenAIRequest
from quire.server.errors import invalid, renamed_fields
from quire.server.grammars.grammar_checker import CONSTRAINT_FIELDS
from quire.server.http.api_keys import CLIENT_ID, KEY_NUMBER
from quire.server.http.request_body import received_s_of
from quire.server.http.request_log import RequestRecord, record_of
from quire.server.options import Limits
from quire.server.service import Service
from quire.server.tools.tool_use import NO_TOOLS, ToolUse, tool_use
from quire.text.conversation import Message
from quire.text.tools import Tool

router = APIRouter()

Prompt = str | list[int]

_STREAMS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}  # with stream: true


@router.post("/v1/completions", openapi_extra=request_body(CompletionBody), responses=_STREAMS)
async def create_completion(request: Request) -> Response:
    """Continue one prompt or several."""
    arrival_s = time.monotonic()
    service: Service = request.app.state.service
    body = await read_body(request, CompletionBody)
    call, record = _checked_request(request, service, body, "cmpl")
    prompts = parse_prompts(body.prompt)
    check_num_choices(len(prompts), call.checked.params.n, service.options)
    record.num_prompts = len(prompts)
    with service.admit(len(prompts), client_id=call.client_id) as reservation:
        check_deadline(service, call)
        await constrain(service, call, constraint_fields(body))
        await prepare_prompts(service, call, body, prompts)
        body.prompt, prompts = None, []    # packed by now: each garbage collection would walk lists of them
        tokenizer = service.client.tokenizer
        if body.echo:
            num_tokens = sum(len(prepared.prompt.token_ids) for prepared in call.requests)
            echoing = partial(CompletionResponseBuilder, call, tokenizer, echo=True)    # decodes the prompts
            builder = await service.threads.run(num_tokens, echoing)
        else:
            builder = CompletionResponseBuilder(call, tokenizer, echo=False)
        generation = await Generation.start(service, call, record, arrival_s, reservation)
    del body    # a request that waits does not hold it
    return await create_response(request, service, generation, builder)


@router.post("/v1/chat/completions", openapi_extra=request_body(ChatBody), responses=_STREAMS)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    arrival_s = time.monotonic()
    service: Service = request.app.state.service
    body = await read_body(request, ChatBody)
    call, record = _checked_request(request, service, body, "chatcmpl")
    check_num_choices(1, call.checked.params.n, service.options)
    record.num_prompts = 1
    with service.admit(1, param="messages", client_id=call.client_id) as reservation:
        with renamed_fields(field_names(body)):
            check_deadline(service, call)
            await constrain(service, call, constraint_fields(body))
            conversation = replace(
                conversation_of(body, body.messages, call.tools.tools), truncation=truncation_of(service, call, body)
            )
            shows_reasoning = body.include_reasoning is not False
            await prepare_chat(service, call, conversation, shows_reasoning=shows_reasoning)
        builder = ChatResponseBuilder(call, service.client.tokenizer)
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
    call = OpenAIRequest(
        id=request_id, model=model, created=int(time.time()), checked=checked, stream=bool(body.stream),
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
    body: ChatBody | TokenizeBody, messages: Sequence[ChatMessage], tools: Sequence[Tool]
) -> ChatPrompt:
    """Return the conversation of a body. InvalidRequestError for variables of the template that are fields."""
    continues = bool(body.continue_final_message)
    begins = body.add_generation_prompt
    variables = template_variables(body.reasoning_effort, body.chat_template_kwargs)
    if isinstance(body, ChatBody) and body.documents is not None:
        variables |= {"documents": _checked_documents(body.documents)}
    return ChatPrompt(
        messages=[_as_message(message) for message in messages],
        tools=tools,
        add_generation_prompt=not continues if begins is None else begins,
        continue_final_message=continues,
        variables=variables,
        adds_special_tokens=bool(body.add_special_tokens),
    )


def _checked_documents(documents: object) -> list[dict[str, Any]]:
    if not isinstance(documents, list) or not all(isinstance(document, dict) for document in documents):
        refuse("documents", documents, "a list of objects")
    return documents


def _as_message(message: ChatMessage) -> Message:
    """Return a message with the keys that were sent: a template may test whether a key is present."""
    named = {name: getattr(message, name) for name in ("role", "content") if name in message.model_fields_set}
    return named | (message.model_extra or {})
