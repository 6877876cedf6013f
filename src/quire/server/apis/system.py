"""Routes of the server itself: health, readiness, load, version, metrics, and /docs, a page without scripts."""

from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from quire.core.version import __version__
from quire.server.errors import shutting_down
from quire.server.service import Service

router = APIRouter(tags=["system"])
_STYLE = "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}td,th{text-align:left;\
vertical-align:top;padding:.1em 1em .1em 0}code{white-space:nowrap}"


@router.get("/health")
async def health(request: Request) -> Response:
    """Answer 200 while the engine is idle or makes progress, 503 when it is dead or stalled."""
    request.app.state.service.check_engine()
    return JSONResponse({})


@router.get("/ping")
@router.post("/ping")
async def ping(request: Request) -> Response:
    """Answer as /health, without a key: SageMaker asks so."""
    return await health(request)


@router.get("/load")
async def load(request: Request) -> Response:
    """Return how many calls of the routes that compute are under way."""
    return JSONResponse({"server_load": request.app.state.service.num_open_calls})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Answer 200 while new requests are admitted."""
    service: Service = request.app.state.service
    service.check_engine()
    if service.is_draining:
        raise shutting_down()
    return JSONResponse({})


@router.get("/version")
async def version() -> Response:
    """Return the version of Quire."""
    return JSONResponse({"version": __version__})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Return counters, gauges and histograms in Prometheus' format."""
    service: Service = request.app.state.service
    page, content_type = service.metrics.exposition([engine.num_queued for engine in service.client.engines])
    return Response(page, headers={"Content-Type": content_type})


@router.get("/docs", response_class=HTMLResponse, include_in_schema=False)
async def docs(request: Request) -> Response:
    """Show all routes and the fields of their bodies."""
    app = request.app
    schema = app.openapi()
    parts = [
        _route(method, path, operation)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(app.title)}</title><style>{_STYLE}</style>"
        f"<h1>{escape(app.title)} {escape(app.version)}</h1><p>The same for programs: "
        f"<a href='openapi.json'>openapi.json</a>.{''.join(parts)}</html>"
    )
    return HTMLResponse(page, headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"})


def _route(method: str, path: str, operation: dict[str, Any]) -> str:
    """Return the section of one route."""
    content = operation.get("requestBody", {}).get("content", {})
    rows = [
        f"<tr><td><code>{escape(name)}</code><td>{escape(_kinds(field))}"
        for body in content.values()
        for name, field in body["schema"].get("properties", {}).items()
    ]
    about = escape(operation.get("description", ""))
    return f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{about}<table>{''.join(rows)}</table>"


def _kinds(field: dict[str, Any]) -> str:
    """Return the types of a field, and its bounds."""
    kinds = []
    for kind in field.get("anyOf", [field]):
        bounds = [f"{name} {value}" for name, value in kind.items() if name in _BOUNDS]
        kinds.append(", ".join([str(kind.get("type", "any")), *bounds]))
    return "; ".join(kind for kind in kinds if kind != "null")


_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "maxLength", "maxItems", "maxProperties", "enum"))
