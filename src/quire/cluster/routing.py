"""Routing of calls to engine replicas: the rule of `quire.engine.fleet` behind Ray Serve's public request router.

Each ingress replica routes by what it has routed itself, and by the reports that its own requests return.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from quire.core.sequence import Request
from quire.engine.fleet.router import Router
from quire.engine.messages import Stepped


class ReplicaTable:
    """The engine replicas that an ingress knows, numbered for its router."""

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, max_replicas: int) -> None:
        num_slots = 2 * max_replicas + 2            # an upgrade has old and new ones
        self._router = Router([num_blocks] * num_slots, block_size, max_num_seqs)
        self._numbers: dict[ReplicaID, int] = {}

    def rank(self, replicas: Sequence[RunningReplica], request: Request) -> list[list[RunningReplica]]:
        """Return the replicas, the one with the least work for a request first."""
        self._update({replica.replica_id for replica in replicas})
        by_number = {self._numbers[replica.replica_id]: replica for replica in replicas}
        return [[by_number[number]] for number in self._router.rank(request, by_number)]

    def assign(self, replica_id: ReplicaID, request: Request) -> None:
        """Record where a request has been routed."""
        if (number := self._numbers.get(replica_id)) is not None:
            self._router.assign(request, number)

    def record_step(self, request_id: int, step: Stepped) -> None:
        """Record a report that a request returned."""
        number = self._router.engine_of(request_id)
        if number is not None:
            kv = step.state.kv
            evicted, used = (0, 0) if kv is None else (kv.evicted_blocks, kv.used_blocks)
            self._router.on_step(number, step.admissions, step.deltas, evicted, used, step.state.waits_for)

    def forget(self, request_id: int) -> None:
        """Forget a request that has ended. Idempotent."""
        self._router.forget(request_id)

    def _update(self, present: set[ReplicaID]) -> None:
        """Number replicas that are new, and free the numbers of those that have gone."""
        for gone in self._numbers.keys() - present:
            self._router.replace(self._numbers.pop(gone))
        free = iter(sorted(set(range(self._router.num_engines)) - set(self._numbers.values())))
        for replica_id in sorted(present - self._numbers.keys(), key=str):
            self._numbers[replica_id] = next(free)


@dataclass(slots=True)
class EngineCall:
    """A request on its way to an engine replica. The table of the ingress stays behind when it is sent.

    So does the ingress's clock: the replica's may be of another machine, so the request's age is sent.
    """

    request: Request
    table: ReplicaTable | None

    def __reduce__(self) -> tuple[Any, ...]:
        received_s = self.request.received_s
        return _sent_call, (self.request, None if received_s is None else time.monotonic() - received_s)


def _sent_call(request: Request, age_s: float | None) -> EngineCall:
    """Return a call that has arrived, with the time of its request on this machine's clock."""
    request.received_s = None if age_s is None else time.monotonic() - age_s
    return EngineCall(request, None)


class PrefixRouter(RequestRouter):
    """Ranks replicas for calls of `generate`; other calls go to any replica."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in order of preference."""
        call = _call_of(pending_request)
        if call is None or call.table is None or not candidate_replicas:
            return [candidate_replicas]
        return call.table.rank(candidate_replicas, call.request)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """Record where a request has been routed."""
        call = _call_of(pending_request)
        if call is not None and call.table is not None:
            call.table.assign(replica_id, call.request)


def _call_of(pending_request: PendingRequest | None) -> EngineCall | None:
    args = pending_request.args if pending_request is not None else ()
    return args[0] if args and isinstance(args[0], EngineCall) else None
