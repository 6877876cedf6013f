"""Log line of each request: its record, which the routes fill, and the id that its client has sent."""

import logging
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import msgspec
from starlette.types import Scope

from quire.server.http.logs import requests_log

MAX_CLIENT_ID_CHARS = 128
RECORD = "quire.record"                                        # key of a scope
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


def write_line(scope: Scope, status: int | None, duration_s: float, record: RequestRecord) -> None:
    """Log one request, without its texts. `status` None: the client disconnected before a response."""
    level = logging.DEBUG if scope["path"] in _PROBES else logging.INFO
    if not requests_log.isEnabledFor(level):
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
