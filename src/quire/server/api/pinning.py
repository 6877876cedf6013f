"""Pinning of a prefix: the request that computes it, for every API that pins."""

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import NamedTuple

from starlette.requests import Request as HttpRequest

from quire.cache.block_table import blocks_for
from quire.core.outputs import PinnedPrefix
from quire.core.sequence import Request
from quire.engine.requests.input_processor import PreparedRequest, TokenizedPrompt
from quire.server.http.application import CLIENT_ID, KEY_NUMBER
from quire.server.service import Service


class ComputedPin(NamedTuple):
    """A prefix that has been computed and pinned, and how many of its tokens were in the cache, or on the disk."""

    prefix: PinnedPrefix
    num_cached_tokens: int
    num_disk_tokens: int


async def pin_prompt(
    request: HttpRequest, service: Service, tokenize: Callable[[], TokenizedPrompt], *, weight: int, ttl_s: float,
    external_id: str, arrival_s: float, before: Callable[[Request], Awaitable[None]] | None = None,
) -> ComputedPin:  # fmt: skip
    """Compute a prompt and pin it under the key of an HTTP request, for `ttl_s` seconds; 0: until it is unpinned.

    `tokenize` is called in a thread; it takes as long as for a text of `weight` characters. `before` is awaited with
    the engine's request before that is queued. Raises what refuses a
    request, and ApiError where the bounds on pins leave no room. At a disconnect nothing stays pinned.
    """
    client, options, pins = service.client, service.options, service.admission.pins
    key_number, client_id = request.scope[KEY_NUMBER], request.scope[CLIENT_ID]

    def prepare() -> PreparedRequest:
        return client.prepare_pin(tokenize(), client_id, options.weight_of(key_number))

    with ExitStack() as holding:
        holding.enter_context(pins.reserve(client.pinned, options))
        with service.admit(1, client_id=client_id) as reservation:
            prepared = await service.threads.run(weight, prepare, client_id)
            limits = client.ready.limits
            num_blocks = blocks_for(len(prepared.request.prompt_token_ids), limits.block_size)
            holding.enter_context(
                pins.reserve_blocks(key_number, num_blocks, limits.num_blocks, client.pinned, options)
            )
            try:
                if before is not None:
                    await before(prepared.request)
                for image in prepared.request.images:
                    reservation.reserve_image(len(image.prepared.pixels), "messages")
                with service.admission.reserve_tokens(client, options, [prepared], param="prompt") as reserved:
                    stream = await client.add(prepared, external_id=external_id, arrival_s=arrival_s)
                    reserved.sent()
            except BaseException:
                client.unpin(prepared.request.request_id)
                raise
            reservation.is_kept = True
            holding.callback(reservation.release)
        try:
            output = await service.responses.run(anext(stream), request.scope, request.receive)
        except BaseException:
            stream.abort()
            client.unpin(prepared.request.request_id)
            raise
        prefix = client.pinned.add(prepared.request, key_number, ttl_s or None)
    if ttl_s:
        client.expire_prefix(prefix.id, ttl_s)
    return ComputedPin(prefix, output.num_cached_tokens, stream.metrics.num_disk_tokens)
