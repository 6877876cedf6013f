"""Routes /tokenize and /detokenize."""

from fastapi import APIRouter, Request, Response

from quire.server.api.bodies import request_body
from quire.server.api.http_responses import json_response
from quire.server.api.request_parsing import read_body
from quire.server.apis.completions.completion_bodies import DetokenizeBody, TokenizeBody
from quire.server.apis.tokenization import detokenized, tokenized
from quire.server.http.api_keys import client_id_of
from quire.server.service import Service

router = APIRouter()


@router.post("/tokenize", openapi_extra=request_body(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Turn a prompt or a conversation into token ids."""
    service: Service = request.app.state.service
    body = await read_body(request, TokenizeBody)
    service.check_model(body.model)
    client_id = client_id_of(request.scope)
    with service.admit(1, client_id=client_id):
        return json_response(await tokenized(service, body, client_id))


@router.post("/detokenize", openapi_extra=request_body(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """Turn token ids into text."""
    service: Service = request.app.state.service
    body = await read_body(request, DetokenizeBody)
    service.check_model(body.model)
    client_id = client_id_of(request.scope)
    with service.admit(1, param="tokens", client_id=client_id):
        return json_response(await detokenized(service, body, client_id))
