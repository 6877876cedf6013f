"""Access middleware: checks the API key, the drain and the queue's room before a request reaches its route."""

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.errors import ApiError, error_response, shutting_down
from quire.server.http.api_keys import KEY_NUMBER, ApiKeys, client_id_of
from quire.server.http.request_body import RequestBody, release_body_of
from quire.server.service import Service

_NO_KEY_NEEDED = frozenset({b"/health", b"/ping"})
_FOR_BROWSERS = b"/debug/"   # paths below it also accept a key from a browser's password dialog
_DOCS, _SCHEMA = b"/docs", b"/openapi.json"  # as well
_ALWAYS_ANSWERED = frozenset({b"/health", b"/ping", b"/ready", b"/load", b"/metrics", b"/version"})  # also in a drain
# Routes that need a place in the queue. A refusal before the body is read costs least in a burst.
_QUEUED = frozenset({
    b"/v1/completions", b"/v1/chat/completions", b"/v1/messages", b"/v1/messages/count_tokens", b"/v1/prefixes",
    b"/tokenize", b"/detokenize", b"/invocations", b"/v1/responses", b"/v1/embeddings", b"/v2/embed", b"/pooling",
    b"/score", b"/v1/score", b"/rerank", b"/v1/rerank", b"/v2/rerank",
})  # fmt: skip
# Of those, the ones that /load leaves out, as in vLLM.
_NO_LOAD = frozenset({b"/v1/messages/count_tokens", b"/v1/prefixes", b"/tokenize", b"/detokenize"})


class RootPath:
    """ASGI middleware that removes the prefix under which a proxy passes requests on, where it has left it."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app, self._prefix, self._raw_prefix = app, root_path, root_path.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] == "http" and scope["raw_path"].startswith(self._raw_prefix + b"/"):
            path, raw_path = scope["path"].removeprefix(self._prefix), scope["raw_path"][len(self._raw_prefix) :]
            scope = {**scope, "path": path, "raw_path": raw_path}
        await self._app(scope, receive, send)


class AccessMiddleware:
    """ASGI middleware. Compares the path as it was sent, so that no other spelling passes for an open path."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._keys = ApiKeys(service.options)
        self._needs_key = bool(service.options.api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error. Routes see GET in place of HEAD."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn knows, and omits the body
        if scope["method"] == "POST":
            receive = RequestBody(scope, receive, self._service)
        num_calls = self._counts_as_load(scope)
        self._service.num_open_calls += num_calls
        try:
            await self._app(scope, receive, send)
        finally:
            self._service.num_open_calls -= num_calls
            release_body_of(scope)

    def _counts_as_load(self, scope: Scope) -> bool:
        return scope["method"] == "POST" and scope["raw_path"] in _QUEUED - _NO_LOAD

    def _check(self, scope: Scope) -> None:
        path = scope["raw_path"]
        is_debugged = self._service.options.enable_debug and path.startswith(_FOR_BROWSERS)
        is_for_browsers = is_debugged or path == _DOCS
        scope[KEY_NUMBER] = self._keys.number_of(scope, allows_basic=is_for_browsers or path == _SCHEMA)
        if self._needs_key and path not in _NO_KEY_NEEDED and not scope[KEY_NUMBER]:
            message = "this server needs one of its keys, as a header 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"
            schemes = 'Bearer, Basic realm="Quire: any user name, a key as password", charset="UTF-8"'
            headers = {"WWW-Authenticate": schemes if is_for_browsers else "Bearer"}
            raise ApiError(401, message, code="invalid_api_key", headers=headers)
        if self._service.is_draining and path not in _ALWAYS_ANSWERED:
            self._service.metrics.refused("shutting_down")
            raise shutting_down()
        if path in _QUEUED and scope["method"] == "POST":
            self._service.check_capacity(1, client_id_of(scope))
