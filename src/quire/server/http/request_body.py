"""Request body reader: checks content type and length, and receives the body within a time limit and a memory bound."""

import asyncio
import time

from starlette.requests import Request
from starlette.types import Message, Receive, Scope

from quire.server.errors import ApiError, body_memory_full
from quire.server.http.api_keys import CLIENT_ID
from quire.server.limits.memory import BodyMemoryFullError, BufferedBody
from quire.server.service import Service

_BODY = "quire.body"              # key of a scope
IS_RECEIVED = "quire.is_received"  # key of a scope: the protocol has all of the body
_RECEIVED = "quire.received_s"    # key of a scope: when the body was complete


class RequestBody:
    """Replacement for the `receive` of a POST: the first message is the whole body, or an ApiError is raised."""

    __slots__ = ("_is_read", "_limit_s", "_max_bytes", "_receive", "_scope", "_service")

    def __init__(self, scope: Scope, receive: Receive, service: Service) -> None:
        self._scope, self._receive, self._service = scope, receive, service
        self._max_bytes, self._limit_s = service.options.max_body_bytes, service.options.receive_timeout
        self._is_read = False

    async def __call__(self) -> Message:
        """Return the next message."""
        if self._is_read:
            return await self._receive()
        self._is_read = True
        self._check_headers()
        clock = asyncio.timeout(self._limit_s)
        bodies = self._service.admission.bodies
        body = BufferedBody(bodies, self._scope[CLIENT_ID], lambda: clock.reschedule(0))
        self._scope[_BODY] = body
        try:
            if self._scope.get(IS_RECEIVED):
                return await self._read(body)    # waits for nothing
            async with clock:
                return await self._read(body)
        except BodyMemoryFullError:
            raise self._memory_full() from None
        except TimeoutError:
            if body.is_dropped:
                raise self._memory_full() from None
            message = f"the body took more than {self._limit_s:g} s (receive_timeout)"
            raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from None
        finally:
            if not body.is_complete:
                body.release()

    def _check_headers(self) -> None:
        """Check the announced type and length. A body without a content type is JSON, as in OpenAI's API."""
        headers = dict(self._scope["headers"])
        content_type = headers.get(b"content-type", b"application/json").decode("latin-1")
        if content_type.partition(";")[0].strip().lower() != "application/json":
            message = f"the body must be application/json, not {content_type[:100]!r}"
            raise ApiError(415, message, code="unsupported_media_type")
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        if encoding.strip().lower() != "identity":
            message = f"the body must not be compressed, and its content-encoding is {encoding[:100]!r}"
            raise ApiError(415, message, code="unsupported_media_type")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_bytes:
            raise self._too_large()

    async def _read(self, body: BufferedBody) -> Message:
        received = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return message
            piece = message.get("body", b"")
            if len(received) + len(piece) > self._max_bytes:
                raise self._too_large()
            body.grow(len(piece))
            received += piece
            if not message.get("more_body", False):
                body.is_complete = True
                self._scope[_RECEIVED] = time.monotonic()
                return {"type": "http.request", "body": bytes(received), "more_body": False}

    def _memory_full(self) -> ApiError:
        self._service.metrics.refused("server_overloaded")
        return body_memory_full(self._service.admission.bodies.max_bytes)

    def _too_large(self) -> ApiError:
        message = f"the body is longer than {self._max_bytes} bytes (max_body_bytes)"
        return ApiError(413, message, code="request_too_large")


def received_s_of(request: Request) -> float:
    """Return when the body of a request had arrived, on the monotonic clock; without one, now."""
    received_s: float = request.scope.get(_RECEIVED) or time.monotonic()
    return received_s


def release_request(request: Request) -> None:
    """Release what a request that waits does not need: its headers, and its body, whose prompts are tokenized."""
    request.scope["headers"] = []
    release_body_of(request.scope)


def release_body_of(scope: Scope) -> None:
    """Stop counting the bytes of the body of a scope, if it has one."""
    body: BufferedBody | None = scope.pop(_BODY, None)
    if body is not None:
        body.release()
