"""Who is let in, and what may be sent: the API key, the drain, and the length, kind and speed of a body."""

import asyncio
import base64
import binascii
import hashlib
import hmac

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.core.owner_labels import OPERATOR
from quire.server.admission.body_memory import BodyMemoryFullError, BufferedBody
from quire.server.errors import ApiError, body_memory_full, error_response, shutting_down
from quire.server.service import Service

_NO_KEY_NEEDED = frozenset({b"/health"})
_FOR_BROWSERS = b"/debug/"   # what is below may also be asked for with a key that a browser's dialog took
_KEY_NUMBER = "quire.key_number"  # of the scope
_BODY = "quire.body"              # of the scope
_ALWAYS_ANSWERED = frozenset({b"/health", b"/ready", b"/metrics", b"/version"})  # also while the server drains
# Whoever asks for these wants a place in the queue. Where there is none he is told at once: a burst costs least so.
_QUEUED = frozenset({b"/v1/completions", b"/v1/chat/completions", b"/v1/prefixes", b"/tokenize", b"/detokenize"})


class AccessMiddleware:
    """ASGI middleware. Looks at the path as it was sent, so that no spelling of another path passes for an open one."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        options = service.options
        self._keys = [(number, _digest(key.encode())) for number, key in enumerate(options.api_key, 1)]
        if options.operator_api_key is not None:
            self._keys.append((OPERATOR, _digest(options.operator_api_key.encode())))
        self._needs_key = bool(options.api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error. A route that is asked for the head alone sees GET."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn knows, and leaves the body out
        if scope["method"] == "POST":
            receive = _BodyReader(scope, receive, self._service)
        try:
            await self._app(scope, receive, send)
        finally:
            _release(scope)

    def _check(self, scope: Scope) -> None:
        path = scope["raw_path"]
        is_for_browsers = self._service.options.enable_debug and path.startswith(_FOR_BROWSERS)
        scope[_KEY_NUMBER] = self._key_number(scope, takes_basic=is_for_browsers)
        if self._needs_key and path not in _NO_KEY_NEEDED and not scope[_KEY_NUMBER]:
            message = "this server needs one of its keys, as a header 'Authorization: Bearer KEY'"
            schemes = 'Bearer, Basic realm="Quire: any user name, a key as password", charset="UTF-8"'
            headers = {"WWW-Authenticate": schemes if is_for_browsers else "Bearer"}
            raise ApiError(401, message, code="invalid_api_key", headers=headers)
        if self._service.is_draining and path not in _ALWAYS_ANSWERED:
            self._service.metrics.refused("shutting_down")
            raise shutting_down()
        if path in _QUEUED and scope["method"] == "POST":
            self._service.check_capacity(1, _client_id(scope))

    def _key_number(self, scope: Scope, *, takes_basic: bool) -> int:
        """Return which key the request carries, from 1, or OPERATOR; 0 for none.

        Takes the same time whichever is, or nearly is.
        """
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = (sent[0] if len(sent) == 1 else b"").partition(b" ")
        is_basic = takes_basic and scheme.lower() == b"basic"
        digest = _digest(_password(key.strip()) if is_basic else key.strip())
        matches = [number for number, known in self._keys if hmac.compare_digest(digest, known)]
        return matches[0] if matches and (is_basic or scheme.lower() == b"bearer") else 0


class _BodyReader:
    """Stands in for `receive`: the body comes whole, or as an ApiError to the route that reads it."""

    def __init__(self, scope: Scope, receive: Receive, service: Service) -> None:
        self._scope, self._receive, self._service = scope, receive, service
        self._headers = dict(scope["headers"])
        self._max_bytes, self._limit_s = service.options.max_body_bytes, service.options.receive_timeout
        self._is_read = False

    async def __call__(self) -> Message:
        if self._is_read:
            return await self._receive()
        self._is_read = True
        self._check_headers()
        clock = asyncio.timeout(self._limit_s)
        held = BufferedBody(self._service.body_memory, client_id_of(Request(self._scope)), lambda: clock.reschedule(0))
        self._scope[_BODY] = held
        try:
            async with clock:
                return await self._read(held)
        except BodyMemoryFullError:
            raise self._full() from None
        except TimeoutError:
            if held.is_dropped:
                raise self._full() from None
            message = f"the body took more than {self._limit_s:g} s (receive_timeout)"
            raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from None
        finally:
            if not held.is_complete:
                held.release()

    def _check_headers(self) -> None:
        """Refuse by what is announced. A body without a content type is taken for JSON, as OpenAI's API does."""
        content_type = self._headers.get(b"content-type", b"application/json").decode("latin-1")
        if content_type.partition(";")[0].strip().lower() != "application/json":
            message = f"the body must be application/json, not {content_type[:100]!r}"
            raise ApiError(415, message, code="unsupported_media_type")
        encoding = self._headers.get(b"content-encoding", b"identity").decode("latin-1")
        if encoding.strip().lower() != "identity":
            message = f"the body must not be compressed, and its content-encoding is {encoding[:100]!r}"
            raise ApiError(415, message, code="unsupported_media_type")
        length = self._headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_bytes:
            raise self._too_large()

    async def _read(self, held: BufferedBody) -> Message:
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return message
            piece = message.get("body", b"")
            if len(body) + len(piece) > self._max_bytes:
                raise self._too_large()
            held.grow(len(piece))
            body += piece
            if not message.get("more_body", False):
                held.complete()
                return {"type": "http.request", "body": bytes(body), "more_body": False}

    def _full(self) -> ApiError:
        self._service.metrics.refused("server_overloaded")
        return body_memory_full(self._service.body_memory.max_bytes)

    def _too_large(self) -> ApiError:
        message = f"the body is longer than {self._max_bytes} bytes (max_body_bytes)"
        return ApiError(413, message, code="request_too_large")


def key_number_of(request: Request) -> int:
    """Return the number of the key that a request came with, from 1, or OPERATOR; 0 where there are no keys."""
    number: int = request.scope[_KEY_NUMBER]
    return number


def client_id_of(request: Request) -> str:
    """Return the client whose share of the server a request takes: its API key, or its connection without one."""
    return _client_id(request.scope)


def _client_id(scope: Scope) -> str:
    if number := scope[_KEY_NUMBER]:
        return "operator" if number == OPERATOR else f"key:{number}"
    host, port = scope.get("client") or ("", 0)     # none where the connection is a local socket
    return f"connection:{host}:{port}"


def release_body(request: Request) -> None:
    """Stop counting a request's body: its prompts are tokenized."""
    _release(request.scope)


def _release(scope: Scope) -> None:
    held: BufferedBody | None = scope.get(_BODY)
    if held is not None:
        held.release()


def _password(credentials: bytes) -> bytes:
    """Return the password of what a browser sends: base64 of user:password."""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
