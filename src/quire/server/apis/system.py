"""Routes of the server itself: health, readiness, load, version and metrics."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from quire.core.version import __version__
from quire.server.errors import asleep, shutting_down
from quire.server.service import Service

router = APIRouter(tags=["system"])


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


@router.get("/kv_event_sources")
async def kv_event_sources(request: Request) -> Response:
    """Return where the KV events of each engine are published, by its number; nothing if they are off."""
    engines = request.app.state.service.metrics.engines
    sources = {number: each.events.source for number, each in enumerate(engines) if each.events is not None}
    return JSONResponse(sources)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Answer 200 while new requests are admitted."""
    service: Service = request.app.state.service
    service.check_engine()
    if service.is_draining:
        raise shutting_down()
    if service.is_asleep:
        raise asleep()
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
