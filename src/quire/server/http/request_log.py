"""Request log: the outermost middleware, which gives each request an id, a log line, and a 500 on any error."""

import logging
import time
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.admission.active_responses import ClientDisconnectedError
from quire.server.errors import error_response
from quire.server.http.logs import requests_log

log = logging.getLogger(__name__)

MAX_CLIENT_ID_CHARS = 128
RECORD = "quire.record"                                        # of the scope
_PROBES = frozenset({"/health", "/ping", "/ready", "/load", "/metrics", "/debug/kv"})  # logged at debug only


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


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of a request, one that is never read without the middleware."""
    record: RequestRecord = scope.setdefault(RECORD, RequestRecord())
    return record


class RequestLog:
    """ASGI middleware. Its `send` is the only one of the server that every chunk of a stream passes."""

    def __init__(self, app: ASGIApp, *, returns_client_ids: bool = False) -> None:
        self._app, self._returns_client_ids = app, returns_client_ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[RECORD] = RequestRecord(request_id=uuid4().hex, client_request_id=_client_id(scope))
        started_s, status = time.monotonic(), None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                client_id = record.client_request_id if self._returns_client_ids else None
                request_id = str(client_id or record.request_id).encode("ascii")
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except (ClientDisconnect, ClientDisconnectedError):
            pass  # no client is left to answer; the log line below has no status
        except Exception as error:
            if status is not None:
                raise  # too late for an error response: uvicorn logs it and closes the connection
            log.exception("request %s failed", record.request_id)
            failure = error_response(scope["app"].state.service.to_api_error(error), scope)
            await failure(scope, receive, send_with_id)
        finally:
            _write(scope, status, time.monotonic() - started_s, record)


def _client_id(scope: Scope) -> str | None:
    """Return the X-Request-Id that a client has sent; None for none, and for one that is long or not printable."""
    sent = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return sent if 0 < len(sent) <= MAX_CLIENT_ID_CHARS and sent.isascii() and sent.isprintable() else None


def _write(scope: Scope, status: int | None, duration_s: float, record: RequestRecord) -> None:
    """Log one request, without its texts. `status` None: the client disconnected before a response."""
    level = logging.DEBUG if scope["path"] in _PROBES else logging.INFO
    if not requests_log.isEnabledFor(level):
        return
    line: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "duration_s": round(duration_s, 6),
    }
    requests_log.log(level, "%s", msgspec.json.encode(line | msgspec.to_builtins(record)).decode())
