"""Debug routes (--enable-debug): the block map and the latest steps as JSON, and pages that draw the map.

The pages contain no data: they call the routes here, with the credentials that opened them.
"""

import time
from typing import Annotated, Any, NoReturn

import msgspec
from fastapi import APIRouter, Query, Request, Response

from quire.core.block_map import MAX_BLOCKS_SHOWN, Tier
from quire.core.checks import refuse
from quire.engine.messages import Ready
from quire.engine.metrics.step_ring import StepRing
from quire.engine.processes.base_client import SingleEngine
from quire.server.api.http_responses import json_response
from quire.server.errors import NO_JSON, engine_unhealthy, invalid
from quire.server.http.application import check_operator
from quire.server.inspect.replay import Operation, replay
from quire.server.pages.page_routes import page
from quire.server.service import Service

DEFAULT_COUNT = 1024
TIERS = "kv, or swap where there is a swap space"
MAP_LIMIT_S = 10.0  # one step of a long prefill may take seconds

MAX_STEP_NUMBER = (1 << 53) - 1     # the largest integer that a browser reads from JSON
MAX_REPLAY_BYTES = 64 << 10         # MAX_OPERATIONS take a third of it

router = APIRouter(tags=["debug"])


class ReplayBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of the playground: all operations since its start."""

    operations: list[Operation]


_decode_replay = msgspec.json.Decoder(ReplayBody).decode


@router.get("/debug/kv")
async def kv(
    request: Request,
    first: Annotated[str, Query(description="number of the first block")] = "0",
    count: Annotated[str, Query(description=f"number of blocks, at most {MAX_BLOCKS_SHOWN}")] = str(DEFAULT_COUNT),
    tier: Annotated[str, Query(description=TIERS)] = "kv",
    engine: Annotated[str, Query(description="number of the engine, of several behind one server")] = "0",
) -> Response:
    """Return blocks of an engine's KV cache or its swap space, with their states and owners."""
    service: Service = request.app.state.service
    engines = service.client.engines
    client = engines[_integer("engine", engine, 0, len(engines) - 1)]
    shown, num_blocks = _tier(tier, client.ready)
    start = _integer("first", first, 0, num_blocks - 1)
    number = _integer("count", count, 1, MAX_BLOCKS_SHOWN)
    try:
        block_map = await client.block_map(start, number, MAP_LIMIT_S, shown)
    except TimeoutError:
        raise engine_unhealthy(f"the engine has not finished a step within {MAP_LIMIT_S:g} s") from None
    return json_response(block_map)


@router.get("/debug/top")
async def top(
    request: Request,
    since: Annotated[str, Query(description="number of the first step; `next` of an answer: those after it")] = "0",
) -> Response:
    """Return each engine's state, its rates, and its latest steps."""
    check_operator(request, "steps are shown")
    service: Service = request.app.state.service
    first = _integer("since", since, 0, MAX_STEP_NUMBER)
    rings = [engine.steps for engine in service.metrics.engines if engine.steps is not None]
    engines = [
        {"engine": number} | _engine_json(client, ring, first)
        for number, (client, ring) in enumerate(zip(service.client.engines, rings, strict=True))
    ]
    return json_response({
        "now": time.monotonic(), "next": max(ring.next for ring in rings), "engines": engines
    })  # fmt: skip


def _engine_json(client: SingleEngine, ring: StepRing, first: int) -> dict[str, Any]:
    state, kv = ring.state, ring.state.kv
    return {
        "is_alive": client.is_alive,
        "running": state.num_running,
        "rows": state.num_running_seqs,
        "waiting": max(state.num_waiting, client.num_queued),  # the engine reports the latest only after a step
        "swapped": state.num_swapped,
        "reason": state.waits_for,
        "blocks": None if kv is None else {
            "free": kv.free_blocks, "cached": kv.cached_blocks, "used": kv.used_blocks, "pinned": kv.pinned_blocks
        },
        "blocks_by_owner": ring.blocks_by_owner,
        "served": None if ring.shares is None else {
            name.replace("key:", "key-"): served for name, served in ring.shares.items()
        },
        "rates": ring.rates(),
        "steps": ring.steps(first),
    }  # fmt: skip


@router.post("/debug/blocks/replay")
async def replay_operations(request: Request) -> Response:
    """Run the playground's operations on a cache of their own; nothing is kept."""
    raw = await request.body()
    if len(raw) > MAX_REPLAY_BYTES:
        invalid(f"operations: the body may have at most {MAX_REPLAY_BYTES} bytes, got {len(raw)}", param="operations")
    try:
        body = _decode_replay(raw)
    except msgspec.ValidationError as error:
        _refuse_field(error)
    except NO_JSON as error:
        invalid(f"the body is not valid JSON: {error}", code="invalid_json")
    return json_response(replay(body.operations))


@router.get("/debug/blocks", include_in_schema=False)
async def live_page() -> Response:
    """Return the page that draws the engine's block map."""
    return page("live.html")


@router.get("/debug/blocks/playground", include_in_schema=False)
async def playground_page() -> Response:
    """Return the playground page."""
    return page("playground.html")


def _tier(name: str, ready: Ready) -> tuple[Tier, int]:
    """Return a tier and its number of blocks."""
    if name == "swap" and ready.num_swap_blocks > 0:
        return "swap", ready.num_swap_blocks
    if name != "kv":
        refuse("tier", name, TIERS)
    return "kv", ready.limits.num_blocks


def _integer(name: str, text: str, low: int, high: int) -> int:
    """Return a query parameter as an integer from `low` to `high`."""
    is_integer = text.isascii() and text.isdigit() and len(text) <= len(str(high))
    if not is_integer or not low <= int(text) <= high:
        refuse(name, text, f"an integer from {low} to {high}")
    return int(text)


def _refuse_field(error: msgspec.ValidationError) -> NoReturn:
    """Refuse a body for msgspec's error, which ends with the field: "... - at `$.operations[0].count`"."""
    text, _, place = str(error).rpartition(" - at `$.")
    param = place.rstrip("`") or "operations"
    invalid(f"{param}: {text or error}", param=param)
