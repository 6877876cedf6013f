"""ASGI application of several models: keys, body, the name in it, and the way to the server of that model and back.

A request is sent on as it came, with its headers, to a server that checks it as any server does; its answer comes back
piece by piece. A request without a model's name goes to the only model that there is (POST), or to the loaded one that
was asked last (all others, which load nothing).
"""

import logging
import time
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from quire.core.version import __version__
from quire.server.apis.messages.messages_bodies import error_body as messages_error_body
from quire.server.errors import NO_JSON, ApiError, as_api_error, invalid, shutting_down
from quire.server.http.application import ApiKeys, RequestLog, RequestRecord, client_id_in, strip_root, with_cors
from quire.server.http.relay import ClientGoneError, HeldBodies, Reply, relay, until_gone
from quire.server.models.ollama import PREFIX, OllamaRoutes
from quire.server.models.ollama_forms import error_body as ollama_error_body
from quire.server.models.places import State
from quire.server.models.supervisor import Supervisor
from quire.server.options import ServerOptions

log = logging.getLogger(__name__)

_PROBES = frozenset({"/health", "/ping", "/ready"})


class Named(msgspec.Struct):
    """Field of a body that is read before its route is known."""

    model: str | None = None


_decode_named = msgspec.json.Decoder(Named).decode


class ModelsApp:
    """Routes of the models' server, and of those that it is in front of."""

    def __init__(self, supervisor: Supervisor, options: ServerOptions) -> None:
        self.is_draining = False
        self._supervisor, self._options = supervisor, options
        self._keys = ApiKeys(options) if options.api_key else None
        self._ollama = OllamaRoutes(supervisor)
        self._log = RequestLog(options.log_requests)
        self._bodies = HeldBodies(options)
        self._created = int(time.time())
        self._app = with_cors(self._answer, options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if self._options.root_path:
            strip_root(scope, self._options.root_path)
        await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with what a route returns, or an error in the form of its API; log what no other server logs."""
        began_s, sender = time.monotonic(), Reply(send)
        record = RequestRecord(client_request_id=client_id_in(scope))
        try:
            await self._check_and_dispatch(scope, receive, sender, record)
        except ClientGoneError:
            sender.is_forwarded = False
        except Exception as error:
            if sender.status is not None:
                raise       # too late for an error response: uvicorn logs it and closes the connection
            sender.is_forwarded = False
            if not isinstance(error, ApiError):
                log.exception("a request failed")
            failure = as_api_error(error)
            await _error_response(failure, scope["path"])(scope, receive, sender.send)
        finally:
            if not sender.is_forwarded:
                self._log.write(scope, sender.status, time.monotonic() - began_s, record)

    async def _check_and_dispatch(
        self, scope: Scope, receive: Receive, sender: Reply, record: RequestRecord
    ) -> None:
        method, path = scope["method"], scope["path"]
        if path not in _PROBES and self._keys is not None and not self._keys.number_of(scope, allows_basic=False):
            message = "this server needs one of its keys, as a header 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if self.is_draining and path not in _PROBES - {"/ready"}:
            raise shutting_down()
        if method != "POST":
            own = self._own(path)
            if own is not None and method in ("GET", "HEAD"):
                await own(scope, receive, sender.send)
                return
            name = self._looked_at(scope)
            await until_gone(receive, self._forward(scope, b"", sender, name, is_use=False))
            return
        body = await self._bodies.read(receive)
        try:
            await until_gone(receive, self._post(scope, body, sender, record))
        finally:
            self._bodies.release(body)

    def _own(self, path: str) -> Response | None:
        """Return the answer to a GET of this server's own; None for a path of the models' servers."""
        if path in _PROBES:
            return JSONResponse({})
        if path == "/version":
            return JSONResponse({"version": __version__})
        if path == "/v1/models":
            data = [self._described(name) for name in self._supervisor.folder.names()]
            return JSONResponse({"object": "list", "data": data})
        if path.startswith("/v1/models/"):
            name = self._supervisor.folder.served_name(path.removeprefix("/v1/models/"))
            return JSONResponse(self._described(name))
        return self._ollama.get(path)

    def _described(self, name: str) -> dict[str, Any]:
        """Return the entry of a model, its state as llama.cpp's router names it."""
        state = self._supervisor.places.state(name)
        status = {"value": {State.CLOSED: "loaded", State.UNLOADING: "unloaded"}.get(state, str(state))}
        return {"id": name, "object": "model", "created": self._created, "owned_by": "quire", "status": status}

    def _looked_at(self, scope: Scope) -> str:
        """Return the loaded model that a GET is for: that of ?model=, or the one that was asked last."""
        asked = parse_qs(scope["query_string"].decode("latin-1")).get("model")
        loaded = self._supervisor.places.loaded()
        name = self._supervisor.folder.served_name(asked[-1]) if asked else (loaded[0] if loaded else None)
        if name is None or name not in loaded:
            told = "no model is loaded" if name is None else f"model {name!r} is not loaded"
            message = f"{told}, and a {scope['method']} loads none: a request that names a model does"
            raise ApiError(404, message, code="model_not_loaded")
        return name

    async def _post(self, scope: Scope, body: bytes, sender: Reply, record: RequestRecord) -> None:
        path = scope["path"]
        if path.startswith(PREFIX):
            await self._ollama.post(path, body, scope["headers"], sender.send)
            return
        record.model = name = self._named(body)
        if path in ("/models/load", "/models/unload"):      # llama.cpp's
            if path == "/models/unload":
                self._supervisor.unload(name)
            else:
                async with self._supervisor.lend(name):
                    pass
            await JSONResponse({"success": True})(scope, _no_message, sender.send)
            return
        await self._forward(scope, body, sender, name)

    def _named(self, body: bytes) -> str:
        """Return the model that a body names, or the only one that there is. ApiError 400 or 404."""
        try:
            asked = _decode_named(body).model
        except msgspec.ValidationError as error:
            invalid(f"the body must be an object, its model a text: {error}", param="model")
        except NO_JSON as error:
            invalid(f"the body is no valid JSON: {error}", code="invalid_json")
        if asked is not None:
            return self._supervisor.folder.served_name(asked)
        names = [*self._supervisor.folder.names()]
        if len(names) != 1:
            told = f"the body must name a model; there are {', '.join(names[:8]) or 'none'}"
            invalid(told, param="model", code="model_required")
        return names[0]

    async def _forward(self, scope: Scope, body: bytes, sender: Reply, name: str, *, is_use: bool = True) -> None:
        """Send a request to the server of a model, and its answer back. ApiError 502 where that dies before."""
        try:
            async with self._supervisor.lend(name, is_use=is_use) as process:
                await relay(process.session, "http://model", scope, body, sender)
        except ApiError as failure:
            if sender.status is None or not sender.is_stream:
                raise       # behind a status the connection is closed: the client sees that the answer is not whole
            event = b"data: " + msgspec.json.encode(failure.body) + b"\n\n"
            await sender.send({"type": "http.response.body", "body": event})


async def _no_message() -> Message:
    return {"type": "http.disconnect"}


def _error_response(error: ApiError, path: str) -> Response:
    """Return the response of an error, in the form of the API that the request is for."""
    body = messages_error_body(error) if path.startswith("/v1/messages") else error.body
    if path.startswith(PREFIX):
        body = ollama_error_body(error)
    return JSONResponse(body, error.status, error.headers)
