"""Routes of pinned prefixes: pin, list, unpin."""

import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.cache.block_table import blocks_for
from quire.core.checks import refuse
from quire.core.outputs import PinnedPrefix
from quire.core.owner_labels import OPERATOR
from quire.engine.input_processor import PreparedRequest, check_cache_salt
from quire.server.api.responses import json_response
from quire.server.http.api_keys import client_id_of, key_number_of
from quire.server.http.request_log import RECORD, RequestRecord
from quire.server.openai.request_models import PrefixBody, request_body
from quire.server.openai.request_parsing import read_body
from quire.server.service import Service

router = APIRouter(tags=["prefixes"])


@router.post("/v1/prefixes", openapi_extra=request_body(PrefixBody))
async def pin_prefix(request: Request) -> Response:
    """Compute a prefix and pin it until it is deleted or expires."""
    service: Service = request.app.state.service
    body = await read_body(request, PrefixBody)
    record: RequestRecord = request.scope.setdefault(RECORD, RequestRecord())
    record.model, record.num_prompts = service.check_model(body.model), 1
    salt = check_cache_salt(body.cache_salt, service.options.max_salt_chars)
    if not isinstance(body.prompt, str | list):
        refuse("prompt", body.prompt, "text or a list of token ids")
    with service.admission.pins.reserve(service.client.pinned, service.options):
        return json_response(_described(await _pin(request, service, body, salt, record)))


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
async def unpin_prefix(request: Request, prefix_id: str) -> Response:
    """Unpin a prefix; requests that use it continue."""
    service: Service = request.app.state.service
    await service.responses.run(service.client.unpin_prefix(prefix_id, _keys_of(request)), request.receive)
    return json_response({"id": prefix_id, "object": "prefix.deleted", "deleted": True})


def _keys_of(request: Request) -> int | None:
    """Return the number of a request's key, which selects the visible pins; None for all keys."""
    number = key_number_of(request)
    return None if number == OPERATOR else number


async def _pin(
    request: Request, service: Service, body: PrefixBody, salt: str | None, record: RequestRecord
) -> PinnedPrefix:
    """Queue the request that computes a prefix and wait for its end. At a disconnect nothing stays pinned."""
    arrival_s, client, options = time.monotonic(), service.client, service.options
    key_number, client_id = key_number_of(request), client_id_of(request.scope)

    def prepare() -> PreparedRequest:
        tokenized = client.inputs.tokenize(body.prompt).salted(salt, key_number)
        return client.prepare_pin(tokenized, client_id, options.weight_of(key_number))

    with ExitStack() as holding:
        with service.admit(1, client_id=client_id) as reservation:
            prepared = await service.threads.run(len(body.prompt), prepare, client_id)
            body.prompt = None             # packed by now: each garbage collection would walk a list of it
            limits = client.ready.limits
            num_blocks = blocks_for(len(prepared.request.prompt_token_ids), limits.block_size)
            pins, total_blocks = service.admission.pins, limits.num_blocks
            holding.enter_context(pins.reserve_blocks(key_number, num_blocks, total_blocks, client.pinned, options))
            with service.reserve_tokens([prepared], param="prompt") as sent:
                stream = await client.add(prepared, external_id=str(record.request_id), arrival_s=arrival_s)
                sent(prepared)
            holding.callback(reservation.keep().release)
        try:
            output = await service.responses.run(anext(stream), request.receive)
        except BaseException:
            stream.abort()
            client.unpin(prepared.request.request_id)
            raise
        record.prompt_tokens, record.cached_tokens = len(prepared.prompt.token_ids), output.num_cached_tokens
        prefix = client.pinned.add(prepared.request, key_number, options.pin_ttl or None)
    if options.pin_ttl:
        client.expire_prefix(prefix.id, options.pin_ttl)
    return prefix


def _described(prefix: PinnedPrefix) -> dict[str, Any]:
    return {"id": prefix.id, "object": "prefix"} | asdict(prefix)
