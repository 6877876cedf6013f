"""Routes of the start page and the chat, of the files that all pages load, and of the server's state as JSON.

Pages hold no data and need no key: what they show, they ask of other routes, with the key that a user gives them. Only
their own scripts and styles may run or load in them.
"""

import time
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.core.version import __version__
from quire.server.api.http_responses import json_response
from quire.server.errors import ApiError, asleep
from quire.server.service import Service

FILES = Path(__file__).parent / "files"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_FILES = {path.name: path for path in FILES.iterdir() if path.suffix in _TYPES}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_LINKS = {
    "chat": "/chat", "docs": "/docs", "openapi": "/openapi.json", "models": "/v1/models", "status": "/status",
    "metrics": "/metrics", "health": "/health",
}  # fmt: skip

router = APIRouter(tags=["system"])


def page(name: str) -> Response:
    """Return a page, a script or a style."""
    path = _FILES[name]
    return Response(path.read_bytes(), media_type=_TYPES[path.suffix], headers=HEADERS)


@router.get("/")
async def start(request: Request) -> Response:
    """Return the start page to a browser; to other clients, the paths of the routes to begin with."""
    is_browser = "text/html" in request.headers.get("accept", "")
    answer = page("start.html") if is_browser else json_response({"links": _LINKS})
    answer.headers["Vary"] = "Accept"
    return answer


@router.get("/chat", include_in_schema=False)
async def chat(request: Request) -> Response:
    """Return the page that chats with the model."""
    return page("chat.html")


@router.get("/pages/{name}", include_in_schema=False)
async def page_file(name: str) -> Response:
    """Return a script or a style of the pages."""
    if name not in _FILES or name.endswith(".html"):
        raise ApiError(404, "the pages have no such file", code="unknown_url")
    return page(name)


@router.get("/status")
async def status(request: Request) -> Response:
    """Return the model, its limits and defaults, and what the engines hold and do."""
    service: Service = request.app.state.service
    return json_response(_status(service))


def _status(service: Service) -> dict[str, Any]:
    ready, engines = service.client.ready, service.client.engines
    caches = [engine.state.kv for engine in engines if engine.state.kv is not None]
    return {
        "version": __version__,
        "problem": _problem(service),
        "uptime_s": max(0, int(time.time()) - service.created),
        "models": [*service.names, *(each.name for each in service.adapters.all)],
        "generates": ready.generates,
        "reads_images": service.images is not None,
        "device": ready.device,
        "dtype": ready.dtype,
        "quantization": ready.quantization or None,
        "num_parameters": ready.num_parameters,
        "weights_bytes": ready.weights_bytes,
        "max_model_len": ready.limits.max_model_len,
        "sampling": ready.sampling.params,
        "num_engines": len(engines),
        "num_running": sum(engine.state.num_running for engine in engines),
        "num_waiting": sum(engine.state.num_waiting for engine in engines),
        "block_size": ready.limits.block_size,
        "num_blocks": ready.limits.num_blocks * len(engines),
        "num_used_blocks": sum(cache.used_blocks for cache in caches),
        "num_cached_blocks": sum(cache.cached_blocks for cache in caches),
        "has_block_map": service.options.enable_debug,
    }


def _problem(service: Service) -> str | None:
    """Return the reason why the engine does not serve, if there is one."""
    if service.is_asleep:
        return asleep().message
    try:
        service.check_engine()
    except ApiError as error:
        return str(error)
    return None
