"""OpenAI's routes: a body is decoded and checked, its prompts become requests, and an answer is made of what they give.

The order is that of cost: fields first, then the queue's limit, then tokens. Nothing is queued before all is checked.
"""

import time
import uuid
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.core.owner_labels import OPERATOR
from quire.engine.input_processor import check_cache_salt
from quire.server.api.generation import Generation
from quire.server.api.responses import create_response, json_response
from quire.server.errors import invalid
from quire.server.http.api_keys import client_id_of, key_number_of
from quire.server.http.request_log import RECORD, RequestRecord
from quire.server.openai.chat_response import ChatResponseBuilder
from quire.server.openai.completion_response import CompletionResponseBuilder
from quire.server.openai.preprocessing import (
    check_num_choices,
    detokenized,
    parse_prompts,
    prepare_chat,
    prepare_prompts,
    tokenized,
)
from quire.server.openai.request_models import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, request_body
from quire.server.openai.request_parsing import read_body
from quire.server.openai.response_builder import ApiRequest
from quire.server.openai.sampling_params import beam_search_params, field_names, sampling_params
from quire.server.service import Service

router = APIRouter()

_STREAMS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}  # with stream: true


@router.post("/v1/completions", openapi_extra=request_body(CompletionBody), responses=_STREAMS)
async def create_completion(request: Request) -> Response:
    """Continue one prompt or several."""
    arrival_s, service = time.monotonic(), _service(request)
    body = await read_body(request, CompletionBody)
    api_request, record = _checked_request(request, service, body, "cmpl")
    prompts = parse_prompts(body.prompt)
    check_num_choices(len(prompts), api_request.params.n, service.options)
    if body.echo and service.client.tokenizer is None:
        invalid("the model has no tokenizer: there is no text to echo", param="echo")
    record.num_prompts = len(prompts)
    with service.admit(len(prompts), client_id=api_request.client_id) as reservation:
        api_request = await prepare_prompts(service, api_request, prompts)
        builder = await _completion_builder(service, api_request, echo=bool(body.echo))
        generation = await Generation.start(service, api_request, record, arrival_s, reservation)
    return await create_response(request, service, generation, builder)


@router.post("/v1/chat/completions", openapi_extra=request_body(ChatBody), responses=_STREAMS)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    arrival_s, service = time.monotonic(), _service(request)
    body = await read_body(request, ChatBody)
    api_request, record = _checked_request(request, service, body, "chatcmpl")
    check_num_choices(1, api_request.params.n, service.options)
    record.num_prompts = 1
    with service.admit(1, param="messages", client_id=api_request.client_id) as reservation:
        with field_names(body):
            api_request = await prepare_chat(service, api_request, body)
        builder = ChatResponseBuilder(api_request, service.client.tokenizer)
        generation = await Generation.start(service, api_request, record, arrival_s, reservation)
    return await create_response(request, service, generation, builder)


@router.post("/tokenize", openapi_extra=request_body(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Turn a prompt or a conversation into token ids."""
    service = _service(request)
    body = await read_body(request, TokenizeBody)
    service.check_model(body.model)
    client_id = client_id_of(request.scope)
    with service.admit(1, client_id=client_id):
        return json_response(await tokenized(service, body, client_id))


@router.post("/detokenize", openapi_extra=request_body(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """Turn token ids into text."""
    service = _service(request)
    body = await read_body(request, DetokenizeBody)
    service.check_model(body.model)
    client_id = client_id_of(request.scope)
    with service.admit(1, param="tokens", client_id=client_id):
        return json_response(await detokenized(service, body, client_id))


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """List the names of the model that is served."""
    service = _service(request)
    return json_response({"object": "list", "data": [_model(service, name) for name in service.names]})


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(request: Request, model_id: str) -> Response:
    """Describe a model."""
    service = _service(request)
    return json_response(_model(service, service.check_model(model_id)))


async def _completion_builder(service: Service, api_request: ApiRequest, *, echo: bool) -> CompletionResponseBuilder:
    """Return the format of a completion; with `echo` it decodes its prompts, off the event loop."""
    tokenizer = service.client.tokenizer
    if not echo:
        return CompletionResponseBuilder(api_request, tokenizer, echo=False)
    num_tokens = sum(len(request.prompt.token_ids) for request in api_request.requests)
    return await service.threads.run(num_tokens, lambda: CompletionResponseBuilder(api_request, tokenizer, echo=True))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "quire",
        "max_model_len": service.client.ready.limits.max_model_len,
    }


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _checked_request(
    request: Request, service: Service, body: CompletionBody | ChatBody, kind: str
) -> tuple[ApiRequest, RequestRecord]:
    """Check all fields of a body but its prompts; return the call for them and the record for its log line."""
    record: RequestRecord = request.scope.setdefault(RECORD, RequestRecord())  # one that nobody reads
    call_id, model = f"{kind}-{uuid.uuid4().hex}", service.check_model(body.model)
    record.request_id, record.model, record.stream = call_id, model, bool(body.stream)
    params = sampling_params(body, service)
    check_cache_salt(body.cache_salt, service.options.max_salt_chars)
    beam = beam_search_params(body, params, service)
    key_number, client_id = key_number_of(request), client_id_of(request.scope)
    _check_priority(service, body.priority or 0, key_number)
    return ApiRequest(call_id, model, int(time.time()), body, params, beam, key_number, client_id), record


def _check_priority(service: Service, priority: int, key_number: int) -> None:
    """Raise ApiError 400 for a priority that this client may not have: one below 0 comes before all others'."""
    level = service.client.inputs.check_priority(priority)
    if level < 0 and key_number != OPERATOR and not service.options.allow_client_priority:
        message = (
            f"priority must be 0 or more, got {level}: below 0 it needs the operator's key (operator_api_key), or a "
            f"server that grants it to all clients (allow_client_priority)"
        )
        invalid(message, param="priority", code="unsupported_parameter")
