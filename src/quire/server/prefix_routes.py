"""Routes of pinned prefixes: compute one and keep it, list them, let one go."""

import time
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.core.checks import refuse
from quire.core.outputs import PinnedPrefix
from quire.engine.input_processor import PreparedRequest, check_cache_salt
from quire.server.errors import invalid
from quire.server.gate import client_id_of, key_number_of
from quire.server.openai.answering import json_response
from quire.server.openai.bodies import PrefixBody, takes
from quire.server.openai.decoding import read_body
from quire.server.request_log import RECORD
from quire.server.service import RequestRecord, Service

router = APIRouter(tags=["prefixes"])


@router.post("/v1/prefixes", openapi_extra=takes(PrefixBody))
async def pin_prefix(request: Request) -> Response:
    """Compute a prefix and keep it until it is deleted."""
    service: Service = request.app.state.service
    body = await read_body(request, PrefixBody)
    record: RequestRecord = request.scope.setdefault(RECORD, RequestRecord())
    record.model, record.num_prompts = service.check_model(body.model), 1
    salt = check_cache_salt(body.cache_salt, service.options.max_salt_chars)
    if not isinstance(body.prompt, str | list):
        refuse("prompt", body.prompt, "text or a list of token ids")
    num_pins, most = len(service.client.pinned) + service.num_pinning, service.options.max_pinned_prefixes
    if num_pins >= most:
        message = f"{num_pins} prefixes are pinned already, and at most {most} may be (max_pinned_prefixes)"
        invalid(message, param="prompt")
    service.num_pinning += 1
    try:
        return json_response(_described(await _pin(request, service, body.prompt, salt, record)))
    finally:
        service.num_pinning -= 1


@router.get("/v1/prefixes")
async def list_prefixes(request: Request) -> Response:
    """List what the asker's key has pinned, in the order in which it was."""
    service: Service = request.app.state.service
    found = service.client.pinned.of(key_number_of(request))
    return json_response({"object": "list", "data": [_described(prefix) for prefix in found]})


@router.delete("/v1/prefixes/{prefix_id}")
async def unpin_prefix(request: Request, prefix_id: str) -> Response:
    """Let a pinned prefix go; requests that use it go on."""
    service: Service = request.app.state.service
    await service.answers.run(service.client.unpin_prefix(prefix_id, key_number_of(request)), request.receive)
    return json_response({"id": prefix_id, "object": "prefix.deleted", "deleted": True})


async def _pin(
    request: Request, service: Service, prompt: str | list[int], salt: str | None, record: RequestRecord
) -> PinnedPrefix:
    """Queue the request that computes a prefix and wait for its end. Nothing stays pinned if nobody waits for that."""
    arrival_s, client = time.monotonic(), service.client

    def prepare() -> PreparedRequest:
        return client.prepare_pin(client.inputs.tokenize(prompt).salted(salt))

    with service.let_in(1):
        prepared = await service.in_thread(len(prompt), prepare, client_id_of(request))
        stream = await client.add(prepared, external_id=str(record.request_id), arrival_s=arrival_s)
    try:
        output = await service.answers.run(anext(stream), request.receive)
    except BaseException:
        stream.abort()
        client.unpin(prepared.request.request_id)
        raise
    record.prompt_tokens, record.cached_tokens = len(output.prompt_token_ids), output.num_cached_tokens
    return client.pinned.add(prepared.request, key_number_of(request))


def _described(prefix: PinnedPrefix) -> dict[str, Any]:
    return {"id": prefix.id, "object": "prefix"} | asdict(prefix)
