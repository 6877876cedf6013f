"""Routes /sleep, /wake_up and /is_sleeping (--enable-sleep-mode), as vLLM has them: for the operator.

From /sleep to /wake_up calls that compute are refused with 503 `asleep`; those that run are ended, or awaited, before
memory is freed (`quire.engine.sleeping`).
"""

import asyncio

from fastapi import APIRouter, Request, Response

from quire.core.errors import ConfigError, ModelError
from quire.engine.messages import TAGS
from quire.server.api.http_responses import json_response
from quire.server.errors import ApiError, asleep, invalid
from quire.server.http.application import check_operator
from quire.server.service import Service

MODES = ("abort", "wait")   # what becomes of the calls that run
POLL_S = 0.02

router = APIRouter(tags=["system"])


@router.post("/sleep")
async def sleep(request: Request, level: str = "1", mode: str = "abort") -> Response:
    """Free the KV cache, and at level 2 the weights as well, once the calls that run were ended (`abort`) or awaited.

    What sleeps at level 1 may be sent to level 2.
    """
    service = _service(request)
    if level not in ("1", "2"):
        invalid(f"level must be 1 (frees the KV cache) or 2 (the weights as well), got {level!r:.100}", param="level")
    if mode not in MODES:
        invalid(f"mode must be {' or '.join(MODES)}, of the calls that run, got {mode!r:.100}", param="mode")
    if service.is_asleep and not service.client.sleeping:
        raise ApiError(409, "a /sleep waits already for the calls that run", code="sleep_running")
    if not service.is_asleep:
        service.is_asleep = True
        try:
            await _end_calls(service, mode)
            await service.client.sleep(int(level))
        except BaseException:
            service.is_asleep = bool(service.client.sleeping)
            raise
    elif level == "2":
        await service.client.sleep(2)
    for engine in service.metrics.engines:
        engine.fell_asleep(int(level))
    return _state(service)


@router.post("/wake_up")
async def wake_up(request: Request) -> Response:
    """Load the weights and make the KV cache again, or one of them, as `tags` name; with both, calls are served.

    Without the memory or the files for it the engine sleeps on, and the error tells why.
    """
    service = _service(request)
    tags = request.query_params.getlist("tags") or [*TAGS]
    if unknown := sorted(set(tags) - TAGS):
        invalid(f"tags must be of {', '.join(sorted(TAGS))}, got {unknown[0]!r:.100}", param="tags")
    try:
        await service.client.wake_up([tag for tag in TAGS if tag in tags])
    except (ConfigError, ModelError) as error:
        raise ApiError(500, f"the engine sleeps on: {error}", type="server_error", code="wake_failed") from error
    if not service.client.sleeping:
        service.is_asleep = False
        for engine in service.metrics.engines:
            engine.woke_up()
    return _state(service)


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    """Tell whether the weights or the KV cache are freed, or about to be."""
    return _state(request.app.state.service)


def _service(request: Request) -> Service:
    """Return the service. ApiError 403 for a client without the operator's key, where there is one."""
    check_operator(request, "engines are sent to sleep")
    service: Service = request.app.state.service
    return service


def _state(service: Service) -> Response:
    return json_response({"is_sleeping": service.is_asleep})


async def _end_calls(service: Service, mode: str) -> None:
    """Wait until no call computes; `abort` ends those that do. ApiError 409 if /wake_up comes first."""
    if mode == "abort":
        service.responses.cancel_all(asleep())
    while service.num_open_calls or len(service.responses) or service.client.num_open:
        await asyncio.sleep(POLL_S)
        if not service.is_asleep:
            raise ApiError(409, "woken up before the calls that run had ended", code="woken_up")
        if mode == "abort":
            service.responses.cancel_all(asleep())  # what was prepared meanwhile
