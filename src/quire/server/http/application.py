"""ASGI application: keys, body, log line and dispatch of a request to the function of its route.

Each request gets an id, a log line, a check of its API key, of the drain and of the room in the queue, and an answer to
any error. A route of a fixed path that takes the request alone is called at once; FastAPI documents all routes, and
serves those with parameters.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.core.errors import EngineError
from quire.core.logs import requests_log
from quire.core.owner_labels import OPERATOR
from quire.server.errors import ApiError, answer_error, body_memory_full, error_response, shutting_down
from quire.server.limits.active_responses import ClientDisconnectedError
from quire.server.limits.memory import BodyMemoryFullError, BufferedBody
from quire.server.options import ServerOptions
from quire.server.service import Service
from quire.server.traces import CallTrace

# Keys of a scope, which the application sets.
KEY_NUMBER = "quire.key_number"  # number of the key that a request carries, from 1, or OPERATOR; 0 without keys
CLIENT_ID = "quire.client_id"    # see `client_id_of`


class ApiKeys:
    """The keys of a server, as digests."""

    def __init__(self, options: ServerOptions) -> None:
        self._keys = [(number, _digest(key.encode())) for number, key in enumerate(options.api_key, 1)]
        if options.operator_api_key is not None:
            self._keys.append((OPERATOR, _digest(options.operator_api_key.encode())))

    def number_of(self, scope: Scope, *, allows_basic: bool) -> int:
        """Return the number of the key in the Authorization or X-API-Key header, from 1, or OPERATOR; 0 for none.

        Takes the same time whichever key matches, or nearly matches. A header that is sent twice counts as none.
        """
        scheme, _, key = _only(scope, b"authorization").partition(b" ")
        is_basic = allows_basic and scheme.lower() == b"basic"
        bearer = self._number_of(_password(key.strip()) if is_basic else key.strip())
        plain = self._number_of(_only(scope, b"x-api-key").strip())
        return (bearer if is_basic or scheme.lower() == b"bearer" else 0) or plain

    def _number_of(self, key: bytes) -> int:
        digest = _digest(key)
        matches = [number for number, known in self._keys if hmac.compare_digest(digest, known)]
        return matches[0] if matches else 0


def _only(scope: Scope, name: bytes) -> bytes:
    """Return the value of a header that is sent once; else an empty one, which is no key."""
    sent = [value for each, value in scope["headers"] if each == name]
    return sent[0] if len(sent) == 1 else b""


def client_id_of(scope: Scope) -> str:
    """Return the client that a request counts for: its API key, or its connection without one."""
    if number := scope[KEY_NUMBER]:
        return "operator" if number == OPERATOR else f"key:{number}"
    host, port = scope.get("client") or ("", 0)     # none where the connection is a local socket
    return f"connection:{host}:{port}"


def check_operator(request: Request, what: str) -> None:
    """Raise ApiError 403 where there is an operator's key, and the request has another one. `what` needs that key."""
    options: ServerOptions = request.app.state.service.options
    if options.operator_api_key is not None and request.scope[KEY_NUMBER] != OPERATOR:
        raise ApiError(403, f"{what} with the operator's key (operator_api_key)", code="operator_only")


def _password(credentials: bytes) -> bytes:
    """Return the password of HTTP Basic credentials: base64 of user:password."""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


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
            if not message.get("more_body", False):
                body.is_complete = True
                self._scope[_RECEIVED] = time.monotonic()
                return {"type": "http.request", "body": b"".join((received, piece)), "more_body": False}
            received += piece

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
    """Release what a request that waits does not need: its headers, and its body once the prompts are tokenized."""
    request.scope["headers"] = ()
    release_body_of(request.scope)


def release_body_of(scope: Scope) -> None:
    """Stop counting the bytes of the body of a scope, if it has one."""
    body: BufferedBody | None = scope.pop(_BODY, None)
    if body is not None:
        body.release()


MAX_CLIENT_ID_CHARS = 128
RECORD = "quire.record"                                        # key of a scope
# Logged at debug only.
_PROBES = frozenset({"/health", "/ping", "/ready", "/load", "/metrics", "/debug/kv", "/debug/top"})


class RequestRecord(msgspec.Struct, omit_defaults=True):
    """Fields of the log line of one HTTP request, set by the routes. A field that is None is left out."""

    request_id: str | None = None
    client_request_id: str | None = None
    model: str | None = None
    stream: bool | None = None
    num_prompts: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reasons: list[str] | None = None
    queue_s: float | None = None
    ttft_s: float | None = None
    preemptions: int | None = None
    trace: CallTrace | None = None      # until a traced call has ended


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of a request, one that is never read outside of the application."""
    record: RequestRecord = scope.setdefault(RECORD, RequestRecord())
    return record


def id_of(record: RequestRecord) -> str:
    """Return the id of a request: that of its route, or a random one."""
    if record.request_id is None:
        record.request_id = uuid4().hex
    return record.request_id


def client_id_in(scope: Scope) -> str | None:
    """Return the X-Request-Id that a client has sent; None for none, and for one that is long or not printable."""
    sent = ""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            sent = value.decode("latin-1")      # the last of several
    return sent if 0 < len(sent) <= MAX_CLIENT_ID_CHARS and sent.isascii() and sent.isprintable() else None


class RequestLog:
    """Lines of a share of the requests, and of each that failed unless the share is 0."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._due = 1.0 - share     # above 1 less the share: the next request has a line, and so the first one

    def write(self, scope: Scope, status: int | None, duration_s: float, record: RequestRecord) -> None:
        """Log one request, without its texts. `status` None: the client disconnected before a response."""
        level = logging.DEBUG if scope["path"] in _PROBES else logging.INFO
        if not self._share or not requests_log.isEnabledFor(level):
            return
        self._due += self._share
        is_due = self._due >= 1.0
        self._due -= is_due
        if not is_due and status is not None and status < 400:
            return
        id_of(record)
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "duration_s": round(duration_s, 6),
        }
        text = msgspec.json.encode(line | msgspec.to_builtins(record)).decode()
        requests_log.handle(requests_log.makeRecord(requests_log.name, level, "", 0, "%s", (text,), None))


log = logging.getLogger(__name__)

_NO_KEY_NEEDED = frozenset({b"/health", b"/ping", b"/ready", b"/", b"/chat"})  # probes, which can send no secret; pages
_PAGE_FILES = b"/pages/"     # nor do paths below it
_FOR_BROWSERS = b"/debug/"   # paths below it also accept a key from a browser's password dialog
_DOCS, _SCHEMA = b"/docs", b"/openapi.json"  # as well
_ALWAYS_ANSWERED = frozenset({b"/health", b"/ping", b"/ready", b"/load", b"/metrics", b"/version"})  # also in a drain
# Routes that need a place in the queue. A refusal before the body is read costs least in a burst.
_QUEUED = frozenset({
    b"/v1/completions", b"/v1/chat/completions", b"/v1/messages", b"/v1/messages/count_tokens", b"/v1/prefixes",
    b"/tokenize", b"/detokenize", b"/invocations", b"/v1/responses", b"/v1/embeddings", b"/v2/embed", b"/pooling",
    b"/score", b"/v1/score", b"/rerank", b"/v1/rerank", b"/v2/rerank",
})  # fmt: skip
# The queued routes that /load counts: all but these, as in vLLM.
_LOAD = _QUEUED - {b"/v1/messages/count_tokens", b"/v1/prefixes", b"/tokenize", b"/detokenize"}


def with_cors(app: ASGIApp, options: ServerOptions) -> ASGIApp:
    """Return an application that lets the pages of other origins read its answers, where the options name any."""
    if not options.allowed_origins:
        return app
    return CORSMiddleware(
        app, allow_origins=options.allowed_origins, allow_methods=options.allowed_methods,
        allow_headers=options.allowed_headers, allow_credentials=options.allow_credentials,
        expose_headers=("X-Request-Id",),
    )  # fmt: skip


def strip_root(scope: Scope, root: str) -> None:
    """Remove the root path of a server from the path of a request, where a proxy has left it."""
    if scope["raw_path"].startswith(root.encode() + b"/"):
        scope["path"], scope["raw_path"] = scope["path"].removeprefix(root), scope["raw_path"][len(root.encode()) :]


class Application(FastAPI):
    """The routes of a service, which they find as `request.app.state.service`."""

    def __init__(self, service: Service, **documentation: Any) -> None:  # noqa: ANN401 (FastAPI's)
        super().__init__(docs_url=None, redoc_url=None, redirect_slashes=False, **documentation)
        self.state.service = self._service = service
        options = service.options
        self._needs_key = bool(options.api_key)
        self._keys = ApiKeys(options) if self._needs_key or options.operator_api_key is not None else None
        self._log = RequestLog(options.log_requests)
        self._returns_client_ids = options.enable_request_id_headers
        self._root_path = options.root_path
        self._endpoints = dict[tuple[str, str], Callable[[Request], Awaitable[Response]]]()   # keyed by method and path
        self._checked = with_cors(self._check_and_dispatch, options)

    def include_router(self, router: APIRouter, **settings: Any) -> None:  # noqa: ANN401 (FastAPI's)
        """Add routes; those that need none of FastAPI's work are found by method and path."""
        super().include_router(router, **settings)
        for route in router.routes:
            if isinstance(route, APIRoute) and [*inspect.signature(route.endpoint).parameters] == ["request"]:
                for method in route.methods or ():
                    self._endpoints[method, route.path] = route.endpoint

    def build_middleware_stack(self) -> ASGIApp:
        """Return FastAPI's way to a route, without its answers to unknown errors: `__call__` has those."""
        handlers = dict(self.exception_handlers)
        return ExceptionMiddleware(AsyncExitStackMiddleware(self.router), handlers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and log it."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        if self._root_path:
            strip_root(scope, self._root_path)
        record = scope[RECORD] = RequestRecord(client_request_id=client_id_in(scope))
        sender = _Sender(send, record, returns_client_id=self._returns_client_ids)
        started_s, traces = time.monotonic(), self._service.traces
        if traces is not None and scope["method"] == "POST" and scope["raw_path"] in _LOAD:
            record.trace = CallTrace.begin(scope["path"], scope["headers"], started_s)
        try:
            await self._checked(scope, receive, sender.send)
        except (ClientDisconnect, ClientDisconnectedError):
            pass  # no client is left to answer; the log line below has no status
        except Exception as error:
            if sender.status is not None:
                raise  # too late for an error response: uvicorn logs it and closes the connection
            log.exception("request %s failed", id_of(record))
            failure = error_response(self._service.to_api_error(error), scope)
            await failure(scope, receive, sender.send)
        finally:
            ended_s = time.monotonic()
            if traces is not None and record.trace is not None:
                record.trace.received_s = scope.get(_RECEIVED)
                traces.end(record, sender.status, ended_s)
            self._log.write(scope, sender.status, ended_s - started_s, record)

    async def _check_and_dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error. Routes see GET in place of HEAD."""
        method, path = scope["method"], scope["raw_path"]
        try:
            self._check(scope)
        except ApiError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        if method == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn knows, and omits the body
        if method != "POST":
            await self.dispatch(scope, receive, send)
            return
        receive = RequestBody(scope, receive, self._service)
        num_calls = path in _LOAD
        self._service.num_open_calls += num_calls
        try:
            await self.dispatch(scope, receive, send)
        finally:
            self._service.num_open_calls -= num_calls
            release_body_of(scope)

    async def dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by its route."""
        endpoint = self._endpoints.get((scope["method"], scope["path"]))
        if endpoint is None:
            await super().__call__(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
        except (ApiError, EngineError, HTTPException) as error:
            response = answer_error(request, error)
        await response(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raise ApiError for a request without a valid key, during a drain, or without room in the queue."""
        path = scope["raw_path"]
        is_debugged = self._service.options.enable_debug and path.startswith(_FOR_BROWSERS)
        is_for_browsers = is_debugged or path == _DOCS
        allows_basic = is_for_browsers or path == _SCHEMA
        scope[KEY_NUMBER] = 0 if self._keys is None else self._keys.number_of(scope, allows_basic=allows_basic)
        scope[CLIENT_ID] = client_id_of(scope)
        is_open = path in _NO_KEY_NEEDED or path.startswith(_PAGE_FILES)
        if self._needs_key and not is_open and not scope[KEY_NUMBER]:
            message = "this server needs one of its keys, as a header 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"
            schemes = 'Bearer, Basic realm="Quire: any user name, a key as password", charset="UTF-8"'
            headers = {"WWW-Authenticate": schemes if is_for_browsers else "Bearer"}
            raise ApiError(401, message, code="invalid_api_key", headers=headers)
        if self._service.is_draining and path not in _ALWAYS_ANSWERED:
            self._service.metrics.refused("shutting_down")
            raise shutting_down()
        if path in _QUEUED and scope["method"] == "POST":
            self._service.check_capacity(1, scope[CLIENT_ID])


class _Sender:
    """The `send` of one request, which every chunk of a stream passes: adds the id, and knows the status."""

    __slots__ = ("_record", "_returns_client_id", "_send", "status")

    def __init__(self, send: Send, record: RequestRecord, *, returns_client_id: bool) -> None:
        self._send, self._record, self._returns_client_id = send, record, returns_client_id
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        """Send a message of a response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            client_id = self._record.client_request_id if self._returns_client_id else None
            request_id = client_id or id_of(self._record)
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode("ascii"))]
        await self._send(message)
