"""Route /tokenizer_info: settings of the tokenizer, for clients that render and count by themselves."""

from fastapi import APIRouter, Request, Response

from quire.server.api.http_responses import json_response
from quire.server.errors import invalid
from quire.server.service import Service

router = APIRouter()


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """Return the settings of tokenizer_config.json, with special tokens as texts, and the chat template."""
    service: Service = request.app.state.service
    tokenizer = service.client.tokenizer
    if tokenizer is None:
        invalid("the model has no tokenizer", param="model")
    return json_response(tokenizer.describe())
