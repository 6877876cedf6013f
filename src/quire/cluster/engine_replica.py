"""Engine replica: an engine process behind a Ray Serve deployment. Each request is a stream of its own reports.

An engine that makes no progress for the stall limit, or that is idle and gives no sign when it is asked, is ended: its
requests end with EngineDeadError, and so does the health check, after which Ray Serve replaces the replica.
"""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
from msgspec import structs

from quire.cluster.routing import EngineCall
from quire.core.frames import frame
from quire.engine import messages
from quire.engine.launcher import EngineProcess
from quire.engine.messages import EngineDeadError, EngineState, Report, RequestRefused, Stepped
from quire.engine.options import EngineOptions
from quire.engine.processes.client import EngineConnection
from quire.engine.processes.liveness import stall_reason, wait_for_stall

QUEUED_TOKENS = "queued_tokens"     # the statistic that the number of replicas follows

encode = msgspec.msgpack.encode


@dataclass(slots=True)
class _Open:
    """A request that the engine computes, by the number that its ingress gave it."""

    client_number: int
    num_open: int                   # branches that have not ended
    num_waiting_tokens: int         # tokens of its prompt, until its first output
    reports: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)     # None: there are no more


class EngineReplica:
    """One engine process. A deployment of this class is called by ingress replicas alone."""

    async def __init__(self, options: EngineOptions, start_timeout_s: float) -> None:  # type: ignore[misc]  # Ray awaits it
        self._numbers = itertools.count()
        self._requests: dict[int, _Open] = {}
        self._state = EngineState(0, 0, 0)
        process = EngineProcess.spawn(options)
        self._connection = await EngineConnection.open(process, start_timeout_s, "skipped")
        self._death = ""
        self._num_signs, self._is_asked = 0, False      # reports of progress; an idle engine was asked for one
        self._receiver = asyncio.create_task(self._receive_all())
        self._watch = asyncio.create_task(self._end_when_stalled(options.stall_limit))

    def ready(self) -> bytes:
        """Return the engine's figures (`Ready`)."""
        return encode(self._connection.ready)

    async def generate(self, call: EngineCall) -> AsyncIterator[bytes]:
        """Compute a request; yield its reports, with the ingress's number of it. A cancelled call aborts it."""
        if self._death:
            raise EngineDeadError(self._death)
        request, number = call.request, next(self._numbers)
        held = _Open(request.request_id, request.params.n, request.num_queued_tokens)
        request.request_id = number
        self._requests[number] = held
        try:
            self._connection.send(frame(messages.add_message(request)))
            while (report := await held.reports.get()) is not None:
                yield report
            if held.num_open:
                raise EngineDeadError(self._death)
        finally:
            del self._requests[number]
            if held.num_open:
                self._connection.send(frame(messages.Abort(number)))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the prompt tokens that wait to be computed."""
        return {QUEUED_TOKENS: float(sum(held.num_waiting_tokens for held in self._requests.values()))}

    def check_health(self) -> None:
        """Raise EngineDeadError once the engine has died, or was ended: Ray Serve replaces the replica."""
        if self._death:
            raise EngineDeadError(self._death)

    def pids(self) -> tuple[int, int]:
        """Return the processes of the replica and of its engine."""
        return os.getpid(), self._connection.engine.process.pid

    async def __del__(self) -> None:
        await self._connection.stop()

    async def _end_when_stalled(self, limit_s: float) -> None:
        """End the engine once it makes no progress."""

        def ask() -> None:
            self._is_asked = True
            self._connection.send(frame(messages.Ping()))

        await wait_for_stall(limit_s, lambda: self._num_signs, lambda: self._is_asked or bool(self._requests), ask)
        self._death = stall_reason(limit_s)
        self._connection.kill()

    async def _receive_all(self) -> None:
        """Divide the engine's reports among its requests, until it dies."""
        try:
            while True:
                report = await self._connection.receive()
                if not isinstance(report, messages.Beat):
                    self._num_signs, self._is_asked = self._num_signs + 1, False
                self._handle(report)
        except (EOFError, ConnectionError):
            self._death = self._death or f"the engine process ended ({await self._connection.stop()})"
        except EngineDeadError as error:
            self._death = str(error)
        finally:
            self._watch.cancel()
            self._death = self._death or "the reader of the engine's outputs stopped"
            for held in self._requests.values():
                held.reports.put_nowait(None)

    def _handle(self, report: Report) -> None:
        match report:
            case Stepped():
                self._divide(report)
            case RequestRefused(request_id) if request_id in self._requests:
                held = self._requests[request_id]
                held.num_open = 0
                held.reports.put_nowait(encode(structs.replace(report, request_id=held.client_number)))
                held.reports.put_nowait(None)
            case messages.Failed(_, message):
                raise EngineDeadError(f"the engine has failed: {message}")
            case _:
                pass

    def _divide(self, step: Stepped) -> None:
        """Give each request what a step has brought it."""
        parts: dict[int, Stepped] = {}

        def part(number: int) -> Stepped | None:
            if number not in self._requests:
                return None
            empty = structs.replace(step, num_computed_tokens=0, admissions=[], deltas=[], preempted=[])
            return parts.setdefault(number, empty)

        for admission in step.admissions:
            if (own := part(admission.request_id)) is not None:
                own.admissions.append(admission._replace(request_id=self._requests[admission.request_id].client_number))
        for number in step.preempted:
            if (own := part(number)) is not None:
                own.preempted.append(self._requests[number].client_number)
        for delta in step.deltas:
            if (own := part(delta.request_id)) is None:
                continue
            held = self._requests[delta.request_id]
            held.num_waiting_tokens = 0
            if delta.error is not None:
                held.num_open = 0
            elif delta.finish_reason is not None:
                held.num_open -= 1
            delta.request_id = held.client_number
            own.deltas.append(delta)
        for number, own in parts.items():
            held = self._requests[number]
            held.reports.put_nowait(encode(own))
            if not held.num_open:
                held.reports.put_nowait(None)
