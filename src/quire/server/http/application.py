"""ASGI application: a straight way from a request to the function of its route.

Each request gets an id, a log line, a check of its API key, of the drain and of the room in the queue, and an answer to
any error. A route of a fixed path that takes the request alone is called at once; FastAPI documents all routes, and
serves those with parameters.
"""

import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

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
from quire.server.errors import ApiError, answer_error, error_response, shutting_down
from quire.server.http.api_keys import CLIENT_ID, KEY_NUMBER, ApiKeys, client_id_of
from quire.server.http.request_body import RequestBody, release_body_of
from quire.server.http.request_log import RECORD, RequestRecord, client_id_in, id_of, write_line
from quire.server.limits.active_responses import ClientDisconnectedError
from quire.server.service import Service

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

Endpoint = Callable[[Request], Awaitable[Response]]


class Application(FastAPI):
    """The routes of a service, which they find as `request.app.state.service`."""

    def __init__(self, service: Service, **documentation: Any) -> None:  # noqa: ANN401 (FastAPI's)
        super().__init__(docs_url=None, redoc_url=None, redirect_slashes=False, **documentation)
        self.state.service = self._service = service
        options = service.options
        self._needs_key = bool(options.api_key)
        self._keys = ApiKeys(options) if self._needs_key or options.operator_api_key is not None else None
        self._returns_client_ids = options.enable_request_id_headers
        self._root_path, self._raw_root_path = options.root_path, options.root_path.encode()
        self._endpoints: dict[tuple[str, str], Endpoint] = {}   # keyed by method and path
        self._checked: ASGIApp = self._check_and_dispatch
        if options.allowed_origins:
            self._checked = CORSMiddleware(
                self._checked, allow_origins=options.allowed_origins, allow_methods=options.allowed_methods,
                allow_headers=options.allowed_headers, allow_credentials=options.allow_credentials,
                expose_headers=("X-Request-Id",),
            )  # fmt: skip

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
        if self._root_path and scope["raw_path"].startswith(self._raw_root_path + b"/"):
            scope["path"] = scope["path"].removeprefix(self._root_path)     # a proxy has left its prefix
            scope["raw_path"] = scope["raw_path"][len(self._raw_root_path) :]
        record = scope[RECORD] = RequestRecord(client_request_id=client_id_in(scope))
        sender = _Sender(send, record, returns_client_id=self._returns_client_ids)
        started_s = time.monotonic()
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
            write_line(scope, sender.status, time.monotonic() - started_s, record)

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
