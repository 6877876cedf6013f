"""A scheduler that tells of each call that changes its later plans, with a checksum of each plan.

It plans what a scheduler without a record plans. A recorder makes the same plans from these calls, so that the engine
has not to encode them. Texts of errors, logprobs of requests that do not search, and vectors
are left out: no plan depends on them.
"""

import logging
import os
import socket
import subprocess
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from struct import Struct as Layout
from typing import Protocol

import msgspec

from quire.cache.manager import KVCacheManager
from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.deltas import SequenceDelta, WaitReason
from quire.core.errors import ConfigError
from quire.core.frames import LENGTH_BYTES, frame
from quire.core.options import parse_bytes
from quire.core.plan import StepPlan, StepResult
from quire.core.pooling import BeamTask
from quire.core.sequence import Request
from quire.engine.launcher import STOP_TIMEOUT_S, start_module, wait_or_kill
from quire.engine.messages import add_message
from quire.engine.options import EngineOptions
from quire.engine.recording.record import (
    Added,
    Held,
    PlanChecked,
    PlanChecksum,
    Recording,
    RequestEnded,
    Requeued,
    Returned,
    RolledBack,
    Sent,
    encode_event,
    encode_into,
    record_start,
)
from quire.scheduling.scheduler import Scheduler, make_cache
from quire.scheduling.waiting_lines import Lack

log = logging.getLogger(__name__)


class Sink(Protocol):
    """What takes the events: a recorder, or the way to one in another process."""

    def put(self, event: Sent, now_s: float = 0.0) -> None:
        """Take the next event. `now_s`: the time by the engine's clock, where it is known."""

    def flush(self) -> None:
        """Send, or write, what was taken."""

    def close(self) -> None:
        """End the record; on return it is whole. Idempotent."""


class RecordedScheduler(Scheduler):
    """A scheduler that gives its events to `sink`, which it flushes when no request is left, or a step has failed."""

    def __init__(
        self, config: SchedulerConfig, cache: KVCacheManager, sink: Sink,
        unprepared: Callable[[Request], Lack | None] = lambda request: None,
    ) -> None:  # fmt: skip
        self.sink, self._put, self._flush = sink, sink.put, sink.flush
        self._add_up = PlanChecksum().add
        self._lacks: list[tuple[int, WaitReason, bool]] = []      # met by the step that is being planned

        def asked(request: Request) -> Lack | None:
            lack = unprepared(request)
            if lack is not None:
                self._lacks.append((request.request_id, *lack))
            return lack

        super().__init__(config, cache, unprepared=asked)

    def add(self, request: Request) -> None:
        """Queue a request, as `Scheduler.add`."""
        super().add(request)
        self._put(Added(request.arrived_s, msgspec.Raw(encode_event(add_message(request)))))

    def abort(self, request_id: int) -> bool:
        """End a request, as `Scheduler.abort`."""
        is_known = super().abort(request_id)
        if is_known:
            self._put(RequestEnded(request_id))
            self._flush()
        return is_known

    def finish(self, request_id: int, index: int) -> bool:
        """End one branch, as `Scheduler.finish`."""
        is_known = super().finish(request_id, index)
        if is_known:
            self._put(RequestEnded(request_id, index))
        return is_known

    # These three are called in each step: a method of the class above is called by its name, as super() takes longer.

    def schedule(self, now_s: float = 0.0) -> StepPlan:
        """Plan the next step, as `Scheduler.schedule`."""
        try:
            plan = Scheduler.schedule(self, now_s)
        except BaseException:
            self._put(PlanChecked(now_s, None, self._lacks), now_s)
            self._lacks = []
            raise
        self._put(PlanChecked(now_s, self._add_up(plan), self._lacks), now_s)
        if self._lacks:
            self._lacks = []
        return plan

    def schedule_next(self) -> StepPlan | None:
        """Plan the step after the one under way, as `Scheduler.schedule_next`."""
        plan = Scheduler.schedule_next(self)
        self._put(PlanChecked(None, None if plan is None else self._add_up(plan)))
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceDelta]:
        """Record a step, as `Scheduler.update`."""
        has_more = result.prompt_logprobs or result.failures or result.logprobs is not None
        self._put(Returned(_planned_by(result, self.queues.running) if has_more else result))
        deltas = Scheduler.update(self, plan, result)
        if not self.queues.requests:
            self._flush()
        return deltas

    def roll_back(self) -> list[int]:
        """Roll back a failed step, as `Scheduler.roll_back`."""
        self._put(RolledBack())
        self._flush()
        return super().roll_back()

    def requeue_running(self) -> None:
        """Preempt all running requests, as `Scheduler.requeue_running`."""
        super().requeue_running()
        self._put(Requeued())

    def hold_all_but(self, request_ids: Collection[int]) -> None:
        """Keep all requests but these out of steps, as `Scheduler.hold_all_but`."""
        super().hold_all_but(request_ids)
        self._put(Held(list(request_ids)))

    def release_all(self) -> None:
        """Let all requests take part in steps, as `Scheduler.release_all`."""
        super().release_all()
        self._put(Held(None))


def _planned_by(result: StepResult, running: Iterable[Request]) -> StepResult:
    """Return a result without what no plan depends on."""
    searches = result.logprobs is not None and any(isinstance(request.task, BeamTask) for request in running)
    return msgspec.structs.replace(
        result, prompt_logprobs=[], logprobs=result.logprobs if searches else None,
        failures=dict.fromkeys(result.failures, ""), at_fault={},
    )  # fmt: skip


# --- the way to the recorder --------------------------------------------------------------------------------------


_SENT_BYTES, _SENT_S = 1 << 16, 0.1  # events are sent together, so many bytes or seconds of them
_MAX_UNSENT_BYTES = 64 << 20    # beyond, the recorder does not keep up, and the record ends
_BATCH_HEAD = Layout(">IBI")    # head of a frame with a list of msgpack
_LIST = 0xDD


class Line:
    """Sends events to a recorder's process, and never waits for it before the end."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        connection.setblocking(False)
        self._process, self._connection = process, connection
        self._is_over, self._due_s = False, 0.0                 # when to send next
        self._batch, self._num_events = bytearray(_BATCH_HEAD.size), 0
        self._unsent = bytearray()

    def put(self, event: Sent, now_s: float = 0.0) -> None:
        """Send an event, soon."""
        encode_into(event, self._batch, -1)
        self._num_events += 1
        if now_s >= self._due_s or len(self._batch) >= _SENT_BYTES:
            self._due_s = max(self._due_s, now_s + _SENT_S)
            self.flush()

    def flush(self) -> None:
        """Send what has been put."""
        if self._num_events:
            _BATCH_HEAD.pack_into(self._batch, 0, len(self._batch) - LENGTH_BYTES, _LIST, self._num_events)
            self._num_events = 0
            if not self._is_over:
                self._unsent += self._batch
            del self._batch[_BATCH_HEAD.size :]
        try:
            while self._unsent and not self._is_over:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            if len(self._unsent) > _MAX_UNSENT_BYTES:
                self._end("it does not keep up")
        except OSError as error:
            self._end(str(error))

    def close(self) -> None:
        """End the record, and wait for the recorder."""
        if not self._is_over:
            self._connection.settimeout(STOP_TIMEOUT_S)
            self.flush()
        self._is_over = True
        self._connection.close()
        wait_or_kill([self._process])

    def _end(self, reason: str) -> None:
        log.error("the recorder gets no more events, so the record ends: %s", reason)
        self._is_over = True
        self._connection.close()
        self._unsent.clear()


def make_recorded_scheduler(
    options: EngineOptions, config: SchedulerConfig, cache: CacheConfig, unprepared: Callable[[Request], Lack | None]
) -> Scheduler:
    """Return the scheduler of an engine, and start the process of its recorder. ConfigError if it could not write."""
    assert options.record is not None, "options without a record"
    folder = Path(options.record)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"record: {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"record: {folder}: no file can be written there")
    start = record_start(options, config, cache)
    process, connection = start_module("quire.engine.recording.recorder")
    max_bytes = parse_bytes(options.record_bytes, "record_bytes")
    connection.sendall(frame(Recording(start, str(folder.resolve()), max_bytes)))
    return RecordedScheduler(config, make_cache(cache), Line(process, connection), unprepared)
