"""Routes of embeddings and scores: OpenAI's /v1/embeddings, Cohere's /v2/embed, vLLM's /pooling and /score, /rerank."""

from fastapi import APIRouter, Request, Response

from quire.core.checks import check_int
from quire.server.api.bodies import request_body
from quire.server.api.http_responses import create_response
from quire.server.api.request_parsing import read_body
from quire.server.apis.embeddings import embedding_responses as responses
from quire.server.apis.embeddings.embedding_bodies import EmbedBody, EmbeddingBody, PoolingBody, RerankBody, ScoreBody
from quire.server.apis.embeddings.embedding_calls import start_embeddings, start_scores
from quire.server.errors import renamed_fields
from quire.server.service import Service

router = APIRouter(tags=["embeddings"])


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
