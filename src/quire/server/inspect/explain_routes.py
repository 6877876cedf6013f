"""Route that explains the latency of a request: queueing, prefix cache misses, preemptions and their cost."""

import time
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.core.checks import shown
from quire.core.outputs import Preemption
from quire.server.api.http_responses import LongResponse, json_response
from quire.server.api.json_encoding import JsonStream, array, encode, encode_streamed
from quire.server.errors import ApiError
from quire.server.history import Miss, PastRequest
from quire.server.http.api_keys import key_number_of
from quire.server.inspect.cache_misses import explain_misses
from quire.server.service import Service

_PROMPTS_AT_ONCE = 64

router = APIRouter(tags=["requests"])


@router.get("/v1/requests/{request_id}/explain")
async def explain(request: Request, request_id: str) -> Response:
    """Explain a running or finished request to clients with the same key."""
    service: Service = request.app.state.service
    history = service.history
    past = history.find(request_id, key_number_of(request))
    if past is None:
        message = f"no request {shown(request_id)} of yours is among the last ones"
        raise ApiError(404, message, param="request_id", code="request_not_found")
    search = explain_misses(history, past, service.client.ready.limits.block_size)
    if _has_cache(service):
        async for _ in service.slices.iterate(search.run()):
            pass
    slices = (
        encode([_explanation(service, past[number], search.miss(number)) for number in numbers])
        for numbers in _ranges(len(past))
    )
    answer = {"id": request_id, "object": "request.explanation", "prompts": JsonStream(array(slices))}
    pieces = encode_streamed(answer)
    return json_response(b"".join(pieces)) if len(past) <= _PROMPTS_AT_ONCE else LongResponse(service, None, pieces)


def _has_cache(service: Service) -> bool:
    states = [engine.state.kv for engine in service.client.engines]
    return any(kv is not None and kv.prefix_queries_tokens > 0 for kv in states)


def _ranges(num_prompts: int) -> Iterator[range]:
    """Yield ranges of prompts that are explained in one slice."""
    for start in range(0, num_prompts, _PROMPTS_AT_ONCE):
        yield range(start, min(start + _PROMPTS_AT_ONCE, num_prompts))


def _explanation(service: Service, past: PastRequest, miss: Miss | None) -> dict[str, Any]:
    metrics = past.metrics
    state, engine = _state(past), service.client.engines[metrics.engine]
    queued_until_s = time.monotonic() if state == "waiting" else metrics.first_scheduled_s
    return {
        "state": state,
        "engine": metrics.engine,
        "waits_for": engine.state.waits_for if state in ("waiting", "preempted") else None,
        "queue_s": None if queued_until_s is None else queued_until_s - metrics.arrival_s,
        "waited_steps": metrics.waited_steps,
        "num_prompt_tokens": past.num_prompt_tokens,
        "num_cached_tokens": metrics.num_cached_tokens,
        "first_miss": None if miss is None else miss._asdict(),
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_accepted_tokens": metrics.num_accepted_tokens,
        "num_preemptions": metrics.num_preemptions,
        "preemptions": [_preemption_json(preemption, metrics.arrival_s) for preemption in metrics.preemptions],
        "ttft_s": None if metrics.first_token_s is None else metrics.first_token_s - metrics.arrival_s,
        "e2e_s": None if metrics.finished_s is None else metrics.finished_s - metrics.arrival_s,
    }


def _state(past: PastRequest) -> str:
    if past.is_over or past.metrics.finished_s is not None:
        return "finished"
    if past.metrics.first_scheduled_s is None:
        return "waiting"
    preemptions = past.metrics.preemptions
    return "preempted" if preemptions and preemptions[-1].returned_s is None else "running"


def _preemption_json(preemption: Preemption, arrival_s: float) -> dict[str, Any]:
    returned_s = preemption.returned_s
    return {
        "at_s": preemption.preempted_s - arrival_s,
        "away_s": None if returned_s is None else returned_s - preemption.preempted_s,
        "cost_s": preemption.cost_s,
        "waited_steps": preemption.waited_steps,
        "num_recomputed_tokens": preemption.num_recomputed_tokens,
        "num_swapped_blocks": preemption.num_swapped_blocks,
    }
