"""Routes of pinned prefixes: pin, list, unpin."""

import time
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response

from quire.core.checks import refuse
from quire.core.outputs import PinnedPrefix
from quire.core.owner_labels import OPERATOR
from quire.engine.requests.input_processor import TokenizedPrompt, check_cache_salt
from quire.server.api.http_responses import json_response
from quire.server.api.pinning import pin_prompt
from quire.server.api.request_bodies import read_body, request_body
from quire.server.apis.completions.completion_bodies import PrefixBody
from quire.server.http.application import KEY_NUMBER, record_of
from quire.server.service import Service

router = APIRouter(tags=["prefixes"])


@router.post("/v1/prefixes", openapi_extra=request_body(PrefixBody))
async def pin_prefix(request: Request) -> Response:
    """Compute a prefix and pin it until it is deleted or expires."""
    service: Service = request.app.state.service
    body = await read_body(request, PrefixBody)
    record = record_of(request.scope)
    model = service.check_model(body.model)
    record.model, record.num_prompts = model, 1
    salt = check_cache_salt(body.cache_salt, service.options.max_salt_chars)
    if not isinstance(body.prompt, str | list):
        refuse("prompt", body.prompt, "text or a list of token ids")

    def tokenize() -> TokenizedPrompt:
        prompt, body.prompt = body.prompt, None     # packed: each garbage collection would walk a list of it
        salted = service.client.inputs.tokenize(prompt).salted(salt, request.scope[KEY_NUMBER])
        return salted.adapted(service.adapter_of(model))

    pinned = await pin_prompt(
        request, service, tokenize, weight=len(body.prompt), ttl_s=service.options.pin_ttl,
        external_id=str(record.request_id), arrival_s=time.monotonic(),
    )  # fmt: skip
    record.prompt_tokens, record.cached_tokens = pinned.prefix.num_tokens, pinned.num_cached_tokens
    return json_response(_described(pinned.prefix))


@router.get("/v1/prefixes")
async def list_prefixes(request: Request) -> Response:
    """List the pinned prefixes of the client's key, oldest first; for the operator those of all keys."""
    client, keys = request.app.state.service.client, _keys_of(request)
    data = [
        _described(pin.prefix) | ({"owner": client.inputs.owners.label(pin.key_number, None)} if keys is None else {})
        for pin in client.pinned.of_key(keys)
    ]
    return json_response({"object": "list", "data": data})


@router.delete("/v1/prefixes/{prefix_id}")
async def unpin_prefix(
    request: Request,
    prefix_id: Annotated[str, Path(description="id of the pinned prefix")],
) -> Response:
    """Unpin a prefix; requests that use it continue."""
    service: Service = request.app.state.service
    unpinning = service.client.unpin_prefix(prefix_id, _keys_of(request))
    await service.responses.run(unpinning, request.scope, request.receive)
    return json_response({"id": prefix_id, "object": "prefix.deleted", "deleted": True})


def _keys_of(request: Request) -> int | None:
    """Return the number of a request's key, which selects the visible pins; None for all keys."""
    number = request.scope[KEY_NUMBER]
    return None if number == OPERATOR else number


def _described(prefix: PinnedPrefix) -> dict[str, Any]:
    return {"id": prefix.id, "object": "prefix"} | asdict(prefix)
