"""Sends the answer to a call that runs, whole or as server-sent events, unless its client goes away.

A stream's status and headers are sent when its requests have been queued: what can be refused has been refused by
then, and clients with a time limit see that they are heard. What goes wrong later is the last event before the end.
"""

import logging
from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.core.errors import EngineError
from quire.core.outputs import RequestOutput
from quire.server.api.active_responses import ClientDisconnectedError
from quire.server.api.generation import Generation, usage_of
from quire.server.api.json_encoding import encode, joined
from quire.server.api.keepalive import KEEPALIVE, Keepalive
from quire.server.errors import ApiError
from quire.server.http.request_body import release_body
from quire.server.openai.response_builder import DONE, ResponseBuilder, event
from quire.server.service import Service
from quire.server.time_slices import MAX_SLICE_BYTES, MAX_SLICE_UNITS

log = logging.getLogger(__name__)


async def create_response(
    request: Request, service: Service, generation: Generation, builder: ResponseBuilder
) -> Response:
    """Return the answer: when all of it is there, or as a stream.

    EngineDeadError, ApiError or ClientDisconnectedError when it cannot be whole.
    """
    release_body(request)
    if builder.request.body.stream:
        return EventStream(service, generation, builder)
    is_long = False
    try:
        outputs = await service.responses.run(generation.last_outputs(), request.receive)
        is_long = sum(map(builder.weight, range(len(outputs)), outputs)) > MAX_SLICE_UNITS
    finally:
        generation.finish()
        if not is_long:
            generation.release()
    pieces = builder.answer(outputs, usage_of(generation.past))
    return LongResponse(service, generation, pieces) if is_long else json_response(b"".join(pieces))


def json_response(answer: object) -> Response:
    """Return an answer of JSON; bytes are JSON already."""
    return Response(answer if isinstance(answer, bytes) else encode(answer), media_type="application/json")


class LongResponse(Response):
    """A whole answer that is written and sent in pieces, one per iteration of the event loop, as fast as it is read."""

    def __init__(self, service: Service, generation: Generation | None, pieces: Iterable[bytes]) -> None:
        self.status_code, self.background = 200, None
        self.init_headers({"content-type": "application/json"})
        self._service, self._generation, self._pieces = service, generation, pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. A client that goes ends it."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._service.responses.run(self._send_pieces(send), receive)
        except (ClientDisconnectedError, OSError):
            log.debug("the client of an answer has gone")
        finally:
            if self._generation is not None:
                self._generation.release()

    async def _send_pieces(self, send: Send) -> None:
        async for piece in self._service.slices.iterate(joined(self._pieces, MAX_SLICE_BYTES)):
            await send(_body(piece))
        await send(_body(b"", more_body=False))


class EventStream(Response):
    """A stream of server-sent events: a send for each output that has something to show, and no task for any."""

    def __init__(self, service: Service, generation: Generation, builder: ResponseBuilder) -> None:
        self.status_code, self.background = 200, None  # the base's constructor would print_banner an empty body
        self.init_headers({
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # nginx would hold events back
        })
        self._service, self._generation, self._builder = service, generation, builder
        self._is_within_event = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. An error ends it with an event of its own."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._service.responses.run(self._send_events(send), receive)
        except (ClientDisconnectedError, OSError):
            log.debug("the client of a stream has gone")
        except Exception as error:
            if not isinstance(error, ApiError | EngineError):
                log.exception("a stream failed")
            cut = b"\n\n" if self._is_within_event else b""
            await send(_body(cut + event(self._service.to_api_error(error).body) + DONE, more_body=False))
        finally:
            self._generation.finish()
            self._generation.release()

    async def _send_events(self, send: Send) -> None:
        async with Keepalive(self._service.options.stream_keepalive, lambda: send(_body(KEEPALIVE))) as keepalive:

            async def send_output(prompt_index: int, output: RequestOutput) -> None:
                await keepalive.write(self._send_output(send, prompt_index, output))

            await self._generation.send_all(send_output)
        usage = b""
        if self._builder.request.include_usage:
            usage = self._builder.usage_chunk(usage_of(self._generation.past))
        await send(_body(usage + DONE, more_body=False))

    async def _send_output(self, send: Send, prompt_index: int, output: RequestOutput) -> None:
        is_long = self._builder.weight(prompt_index, output) > MAX_SLICE_UNITS
        chunks = self._builder.chunks(prompt_index, output)
        if not is_long:
            if written := b"".join(chunks):
                await send(_body(written))
            return
        self._is_within_event = True
        async for piece in self._service.slices.iterate(joined(chunks, MAX_SLICE_BYTES)):
            await send(_body(piece))
        self._is_within_event = False


def _body(body: bytes, *, more_body: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more_body}
