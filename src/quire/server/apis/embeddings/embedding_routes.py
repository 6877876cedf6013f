"""Routes of embeddings and scores: OpenAI's /v1/embeddings, Cohere's /v2/embed, vLLM's /pooling and /score, /rerank.

The fields and bounds of a call are checked, a place in the queue is reserved, and its prompts are tokenized.
"""

import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastapi import APIRouter, Request, Response

from quire.core.checks import check_int, refuse
from quire.core.pooling import PoolingParams, PoolingTask
from quire.engine.requests.input_processor import Prompt, TokenizedPrompt, check_cache_salt
from quire.engine.requests.pooling_inputs import (
    CheckedPooling,
    PairOptions,
    PoolingInputs,
    Scoring,
    check_pairs,
    pair_options,
    tokenize_pairs,
)
from quire.server.api.chat import ChatPrompt, rendered, template_variables
from quire.server.api.generation import Generation
from quire.server.api.http_responses import create_response
from quire.server.api.preparation import ApiRequest, check_priority_granted
from quire.server.api.request_bodies import read_body, request_body
from quire.server.apis.embeddings import embedding_responses as responses
from quire.server.apis.embeddings.embedding_bodies import (
    EmbedBody,
    EmbeddingBody,
    PairsBody,
    PooledBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from quire.server.errors import invalid, renamed_fields
from quire.server.http.application import CLIENT_ID, KEY_NUMBER, record_of
from quire.server.options import Limits
from quire.server.service import Service
from quire.text.conversation import Message

router = APIRouter(tags=["embeddings"])
_TOKEN_BYTES = 4  # a token id counts as so many


@router.post("/v1/embeddings", openapi_extra=request_body(EmbeddingBody))
async def create_embeddings(request: Request) -> Response:
    """Return the embedding of one text or of several."""
    service, body = _service(request), await read_body(request, EmbeddingBody)
    is_base64 = body.encoding_format == "base64"
    call, generation = await start_embeddings(request, service, body, "embd")
    return await create_response(request, service, generation, responses.embeddings(call, is_base64=is_base64))


@router.post("/v2/embed", openapi_extra=request_body(EmbedBody))
async def embed(request: Request) -> Response:
    """Return the embedding of each text in the forms that are asked for."""
    service, body = _service(request), await read_body(request, EmbedBody)
    types = body.types
    with renamed_fields({"dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens"}):
        call, generation = await start_embeddings(request, service, body.whole, "embd", param="texts")
    builder = responses.embeddings_by_type(call, types, body.texts)
    return await create_response(request, service, generation, builder)


@router.post("/pooling", openapi_extra=request_body(PoolingBody))
async def create_pooling(request: Request) -> Response:
    """Return the vector of one text or of several."""
    service, body = _service(request), await read_body(request, PoolingBody)
    is_base64 = body.encoding_format == "base64"
    call, generation = await start_embeddings(request, service, body, "pool")
    builder = responses.embeddings(call, is_base64=is_base64, kind="pooling", name="data")
    return await create_response(request, service, generation, builder)


@router.post("/score", openapi_extra=request_body(ScoreBody))
@router.post("/v1/score", openapi_extra=request_body(ScoreBody))
async def create_scores(request: Request) -> Response:
    """Return the score of each pair of texts."""
    service, body = _service(request), await read_body(request, ScoreBody)
    (call, generation), scoring = await start_scores(request, service, body, "score")
    return await create_response(request, service, generation, responses.scores(call, scoring))


@router.post("/rerank", openapi_extra=request_body(RerankBody))
@router.post("/v1/rerank", openapi_extra=request_body(RerankBody))
@router.post("/v2/rerank", openapi_extra=request_body(RerankBody))
async def rerank(request: Request) -> Response:
    """Order documents by their scores for a query."""
    service, body = _service(request), await read_body(request, RerankBody)
    top_n = check_int("top_n", body.top_n or 0, 0)
    (call, generation), scoring = await start_scores(request, service, body, "rerank")
    documents = None if body.return_documents is False else body.sides["documents"]
    builder = responses.ranking(call, scoring, documents, top_n)
    return await create_response(request, service, generation, builder)


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


class Started(NamedTuple):
    """A call with its requests queued."""

    call: ApiRequest
    generation: Generation


async def start_embeddings(
    request: Request, service: Service, body: EmbeddingBody, kind: str, *, param: str = "input"
) -> Started:
    """Queue a request for each input of a body, or for its conversation.

    `kind` is the prefix of the call's id, `param` the field of the inputs in the client's body.
    """
    arrival_s, pooling = time.monotonic(), _pooling_inputs(service)
    if body.encoding_format not in (None, "float", "base64"):
        refuse("encoding_format", body.encoding_format, "float or base64")
    call, checked = _checked(request, service, pooling, body, body.params, "embed", kind)
    if (body.input is None) == (body.messages is None):
        invalid("give either input or messages", param="input")
    truncation = pooling.check_truncation(body.truncate_prompt_tokens, body.truncation_side)
    conversation: ChatPrompt | None = None
    if body.messages is None:
        prompts = parse_inputs(body.input, service.options, param)
        adds_special_tokens = body.add_special_tokens is not False
    else:
        prompts, conversation, param = [""], _conversation(body, body.messages), "messages"
        adds_special_tokens = conversation.adds_special_tokens
    body.input = body.messages = None     # packed soon: each garbage collection would walk lists of token ids

    def tokenize() -> list[TokenizedPrompt]:
        how = {"add_special_tokens": adds_special_tokens, "truncation": truncation}
        return [pooling.tokenize(each, **how) for each in prompts]

    with (
        renamed_fields({"prompt": param}),
        service.admit(len(prompts), param=param, client_id=call.client_id) as reservation,
    ):
        if conversation is not None:
            prompts = [(await rendered(service, conversation, call.client_id)).text]
            call.rendered_s = time.monotonic()
            _check_bytes(_num_bytes(prompts[0]), service.options, param)
        num_chars = sum(map(len, prompts))
        tokenized = await service.threads.run(num_chars, lambda: _limited(tokenize(), service, param), call.client_id)
        _add_requests(service, pooling, call, checked, tokenized)
        record_of(request.scope).num_prompts = len(prompts)
        return Started(call, await Generation.start(service, call, record_of(request.scope), arrival_s, reservation))


async def start_scores(
    request: Request, service: Service, body: ScoreBody | RerankBody, kind: str
) -> tuple[Started, Scoring]:
    """Queue the requests of a call for scores; return also what makes scores of their vectors."""
    arrival_s, pooling = time.monotonic(), _pooling_inputs(service)
    task: PoolingTask = "score" if pooling.pooler.is_reranker else "embed"
    call, checked = _checked(request, service, pooling, body, PoolingParams(), task, kind)
    (first, queries), (second, documents) = body.sides.items()
    most = service.options.max_rerank_documents
    if max(len(queries), len(documents)) > most:
        refuse(second, documents, f"at most {most} texts (max_rerank_documents)")
    check_pairs(queries, documents, (first, second))
    options = _pair_options(pooling, body)
    num_pairs = len(documents)
    num_read = num_pairs if pooling.pooler.is_reranker else len(queries)
    num_bytes = sum(_num_bytes(text) for text in documents) + num_pairs * len(options.instruction.encode())
    num_bytes += _num_bytes(queries[0]) * num_read if len(queries) == 1 else sum(map(_num_bytes, queries))
    _check_bytes(num_bytes, service.options, second)
    num_prompts = num_pairs if pooling.pooler.is_reranker else len(queries) + num_pairs

    def prepare() -> Scoring:
        scoring = tokenize_pairs(pooling, queries, documents, options)
        return scoring._replace(prompts=_limited(scoring.prompts, service, second))

    with service.admit(num_prompts, param=second, client_id=call.client_id) as reservation:
        with renamed_fields({"prompt": second}):
            scoring = await service.threads.run(num_bytes, prepare, call.client_id)
        _add_requests(service, pooling, call, checked, scoring.prompts)
        record_of(request.scope).num_prompts = num_prompts
        generation = await Generation.start(service, call, record_of(request.scope), arrival_s, reservation)
        return Started(call, generation), scoring


def _conversation(body: EmbeddingBody, messages: Sequence[Message]) -> ChatPrompt:
    """Return the conversation of a body; by default no answer is begun, as in vLLM."""
    return ChatPrompt(
        messages=messages,
        add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=bool(body.continue_final_message),
        variables=template_variables(None, body.chat_template_kwargs),
        adds_special_tokens=bool(body.add_special_tokens),
    )


def parse_inputs(given: Any, limits: Limits, param: str = "input") -> list[Prompt]:  # noqa: ANN401 (JSON)
    """Return the inputs of a body as a list, within the bounds on their number and bytes."""
    if isinstance(given, str):
        inputs: list[Any] = [given]
    elif isinstance(given, list) and given and type(given[0]) is int:
        inputs = [given]
    elif isinstance(given, list) and given and any(_all_are(kind, given) for kind in (str, list)):
        inputs = given
    else:
        expected = "text, a list of token ids, or a list that is not empty, of texts or of lists of token ids"
        refuse(param, given, expected)
    if len(inputs) > limits.max_embedding_inputs:
        refuse(param, given, f"at most {limits.max_embedding_inputs} inputs (max_embedding_inputs)")
    _check_bytes(sum(_num_bytes(each) for each in inputs), limits, param)
    return inputs


def _all_are(kind: type, values: Sequence[Any]) -> bool:
    return all(isinstance(value, kind) for value in values)


def _num_bytes(given: Any) -> int:  # noqa: ANN401 (JSON)
    return len(given.encode(errors="replace")) if isinstance(given, str) else _TOKEN_BYTES * len(given)


def _check_bytes(num_bytes: int, limits: Limits, param: str) -> None:
    most = limits.max_pooling_bytes
    if num_bytes > most:
        invalid(f"the texts of the call come to {num_bytes} bytes; at most {most} (max_pooling_bytes)", param=param)


def _limited(prompts: list[TokenizedPrompt], service: Service, param: str) -> list[TokenizedPrompt]:
    """Return the prompts, each of a length that can run, and all together within `max_call_tokens`."""
    limits, most = service.client.inputs.limits, service.options.max_call_tokens
    for prompt in prompts:
        limits.check_admissible(len(prompt.token_ids), 0, 1)
    if sum(len(prompt.token_ids) for prompt in prompts) > most:
        invalid(f"the prompts of one call may have at most {most} tokens together (max_call_tokens)", param=param)
    return prompts


def _pooling_inputs(service: Service) -> PoolingInputs:
    return PoolingInputs(service.client.inputs, service.client.ready)


def _checked(
    request: Request, service: Service, pooling: PoolingInputs, body: PooledBody, params: PoolingParams,
    task: PoolingTask, kind: str,
) -> tuple[ApiRequest, CheckedPooling]:  # fmt: skip
    """Check the fields of a body that all routes have; return the call, without prompts."""
    record, call_id, model = record_of(request.scope), f"{kind}-{uuid.uuid4().hex}", service.check_model(body.model)
    record.request_id, record.model = call_id, model
    checked = pooling.check(params, task, body.priority or 0)
    key_number = request.scope[KEY_NUMBER]
    check_priority_granted(service, checked.params.priority, key_number)
    call = ApiRequest(
        id=call_id, model=model, created=int(time.time()), checked=checked.params, key_number=key_number,
        cache_salt=check_cache_salt(body.cache_salt, service.options.max_salt_chars),
        client_id=request.scope[CLIENT_ID],
    )  # fmt: skip
    return call, checked


def _pair_options(pooling: PoolingInputs, body: PairsBody) -> PairOptions:
    truncation = pooling.check_truncation(body.truncate_prompt_tokens, body.truncation_side)
    return pair_options(
        pooling, truncation, instruction=body.instruction, max_tokens_per_query=body.max_tokens_per_query or 0,
        max_tokens_per_doc=body.max_tokens_per_doc or 0, use_activation=body.use_activation,
    )  # fmt: skip


def _add_requests(
    service: Service, pooling: PoolingInputs, call: ApiRequest, checked: CheckedPooling,
    prompts: Sequence[TokenizedPrompt],
) -> None:  # fmt: skip
    request_ids, adapter = service.client.request_ids, service.adapter_of(call.model)
    weight = service.options.weight_of(call.key_number)
    call.requests = [
        pooling.prepare(
            next(request_ids),
            prompt._replace(cache_salt=call.cache_salt, key_number=call.key_number, adapter=adapter),
            checked, call.client_id, weight,
        )
        for prompt in prompts
    ]  # fmt: skip
    call.tokenized_s = time.monotonic()
