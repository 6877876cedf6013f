"""Route that explains the latency of a request: queueing, prefix cache misses, preemptions and their cost.

One pass over the tokens that the owner's calls have computed finds the misses of all prompts: prefixes are compared by
a hash that is extended block by block, so the cost is linear in the history, whatever the number and likeness of the
prompts. The pass runs in slices, since it may take a tenth of a second. Requests of other owners are never read.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response

from quire.core.outputs import Preemption
from quire.server.api.http_responses import JsonStream, LongResponse, array, encode, encode_streamed, json_response
from quire.server.history import History, Miss, MissReason, PastRequest
from quire.server.http.application import KEY_NUMBER
from quire.server.limits.fair_semaphore import MAX_SLICE_UNITS
from quire.server.service import Service

_NEVER_S = math.inf
_Key = tuple[int, bytes]  # hash of the full blocks of a prefix, and its tokens behind them
_PROMPTS_AT_ONCE = 64

router = APIRouter(tags=["requests"])


@dataclass(slots=True)
class _Sighting:
    """First time at which a prefix had been computed: with the salt of the call, by engine, and with other salts."""

    same_salt_s: dict[int, float] = field(default_factory=dict)
    other_salt_s: float = _NEVER_S


def explain_misses(history: History, requests: Sequence[PastRequest], block_size: int) -> "MissSearch":
    """Return the search for the misses of a call's requests, all of one key and one salt."""
    return MissSearch(requests, history.comparable(requests[0].prompt), block_size)


class MissSearch:
    """Search for the reasons of misses. `run` it to its end before reading `miss`."""

    def __init__(
        self, requests: Sequence[PastRequest], calls: Sequence[Sequence[PastRequest]], block_size: int
    ) -> None:
        self._requests, self._calls, self._block_size = requests, calls, block_size
        self._block_bytes = 4 * block_size
        self._keys: dict[int, _Key] = {}                     # keyed by the number of the request
        self._sightings: dict[_Key, _Sighting] = {}
        self._remainders: dict[int, set[int]] = {}           # number of full blocks -> bytes wanted behind them

    def run(self) -> Iterator[None]:
        """Search, and yield after each slice of work."""
        num_units = 0
        for work in (self._index(), self._search()):
            for units in work:
                num_units += units
                if num_units >= MAX_SLICE_UNITS:
                    num_units = 0
                    yield

    def miss(self, number: int) -> Miss | None:
        """Return the first miss of a prompt; None if the cache had all of it, or was not searched."""
        key = self._keys.get(number)
        if key is None:
            return None
        metrics, seen = self._requests[number].metrics, self._sightings[key]
        assert metrics.first_scheduled_s is not None, "searched before it ran"
        reason: MissReason = "never_seen"
        if metrics.num_stateless_tokens:
            reason = "no_state"
        elif seen.same_salt_s.get(metrics.engine, _NEVER_S) < metrics.first_scheduled_s:
            reason = "evicted"
        elif min(seen.same_salt_s.values(), default=_NEVER_S) < metrics.first_scheduled_s:
            reason = "other_engine"
        elif seen.other_salt_s < metrics.first_scheduled_s:
            reason = "other_salt"
        return Miss(metrics.num_cached_tokens, metrics.num_cached_tokens // self._block_size, reason)

    def _index(self) -> Iterator[int]:
        """Index the missed prefixes, each up to the first token that was not found; yield units of work."""
        for number, request in enumerate(self._requests):
            num_found = request.metrics.num_cached_tokens
            has_run = request.metrics.first_scheduled_s is not None
            yield 1
            if not request.reads_cache or not has_run or num_found >= request.num_prompt_tokens - 1:
                continue  # the last token is always computed
            num_blocks = num_found // self._block_size
            hashed = 0
            for block in range(num_blocks):
                hashed = hash((hashed, self._block(request.prompt_tokens, block)))
                yield 1
            rest = request.prompt_tokens[num_blocks * self._block_bytes : 4 * (num_found + 1)]
            self._keys[number] = key = hashed, rest
            self._sightings.setdefault(key, _Sighting())
            self._remainders.setdefault(num_blocks, set()).add(len(rest))

    def _search(self) -> Iterator[int]:
        """Search the computed tokens for the prefixes; yield units of work."""
        if not self._keys:
            return
        salt = self._requests[0].prompt.cache_salt
        for requests in self._calls:
            for past in requests:
                yield 1
                if past.metrics.first_token_s is not None:
                    engine = past.metrics.engine if past.prompt.cache_salt == salt else None
                    yield from self._search_request(past, past.metrics.first_token_s, engine)

    def _search_request(self, past: PastRequest, started_s: float, engine: int | None) -> Iterator[int]:
        """Search a prompt, and from its last full block on each branch except its last token.

        `engine`: that has computed it with the salt of the call; None: with another salt.
        """
        num_prompt_blocks = len(past.prompt_tokens) // self._block_bytes
        begin = num_prompt_blocks * self._block_bytes
        hashed = 0
        for block in range(num_prompt_blocks):
            hashed = self._compare_block(past.prompt_tokens, block, block, hashed, started_s, engine)
            yield 1
        for answer in list(past.branches.values()):
            tail = past.prompt_tokens[begin:] + memoryview(answer)[:-1].tobytes()
            branch_hash = hashed
            for block in range(len(tail) // self._block_bytes):
                num_before = num_prompt_blocks + block
                branch_hash = self._compare_block(tail, block, num_before, branch_hash, started_s, engine)
                yield 1

    def _compare_block(
        self, tokens: bytes, block: int, num_before: int, hashed: int, started_s: float, engine: int | None
    ) -> int:
        """Compare a full block, with `num_before` of the same hash chain before it; return the hash with it."""
        content = self._block(tokens, block)
        for num_bytes in self._remainders.get(num_before, ()):
            seen = self._sightings.get((hashed, content[:num_bytes]))
            if seen is not None and engine is not None:
                seen.same_salt_s[engine] = min(seen.same_salt_s.get(engine, _NEVER_S), started_s)
            elif seen is not None:
                seen.other_salt_s = min(seen.other_salt_s, started_s)
        return hash((hashed, content))

    def _block(self, tokens: bytes, block: int) -> bytes:
        return tokens[block * self._block_bytes : (block + 1) * self._block_bytes]


@router.get("/v1/requests/{request_id}/explain")
async def explain(
    request: Request,
    request_id: Annotated[str, Path(description="id of the request, as its answer has it")],
) -> Response:
    """Explain a running or finished request to clients with the same key."""
    service: Service = request.app.state.service
    history = service.history
    past = history.find(request_id, request.scope[KEY_NUMBER])
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
        "num_stateless_tokens": metrics.num_stateless_tokens,
        "num_disk_tokens": metrics.num_disk_tokens,
        "num_peer_tokens": metrics.num_peer_tokens,
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
