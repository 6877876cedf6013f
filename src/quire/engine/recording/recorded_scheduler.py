"""A scheduler that tells of each call that changes its later plans, and of each plan what is compared.

It plans what a scheduler without a record plans. A recorder makes the same plans from these calls, so that the engine
has not to encode them. A plan is sent with its result: one event is half the work of two. Texts of errors, logprobs of
requests that do not search, and vectors are left out: no plan depends on them.
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
from quire.core.plan import UNMEASURED, StepPlan, StepResult, encode
from quire.core.pooling import BeamTask
from quire.core.sequence import Request, Sequence
from quire.engine.launcher import start_module, wait_or_kill
from quire.engine.messages import add_message
from quire.engine.options import EngineOptions
from quire.engine.recording.record import (
    Added,
    Held,
    PlanChecked,
    Recording,
    RequestEnded,
    Requeued,
    Returned,
    RolledBack,
    Sent,
    Updated,
    encode_event,
    encode_into,
    record_start,
    whole_check,
)
from quire.scheduling.scheduler import Scheduler, make_cache
from quire.scheduling.waiting_lines import Lack

log = logging.getLogger(__name__)

_update = Scheduler.update      # super() takes longer

_SENT_BYTES, _SENT_S = 1 << 16, 0.1  # events are sent together, so many bytes or seconds of them
_BATCH_HEAD = Layout(">IBI")    # head of a frame with a list of msgpack
_LIST = 0xDD
_WHOLE_EVERY = 64               # plans


class Sink(Protocol):
    """Receiver of frames of events: a recorder, or the connection to one in another process."""

    def send(self, events: bytes | bytearray) -> None:
        """Take a frame with the next events, or none."""

    def close(self) -> None:
        """End the record; on return it is whole. Idempotent."""


class RecordedScheduler(Scheduler):
    """A scheduler that sends its events to `sink`, at once when no request is left, or a step has failed.

    Most plans decode the sequences of the plan before once more, from the next position on, and are told as their new
    blocks, together with their results. Those that change rows, and every 64th, are told as wholes. A decision that
    differs is in the state of a scheduler, so it shows in the plans behind it, too.

    Such steps are kept as numbers, 63 at most, and encoded together: in each step the encoder's code would have to come
    into the CPU's caches again. Plans and results are not kept: their lists would not be in the caches any more when
    they are freed.
    """

    def __init__(
        self, config: SchedulerConfig, cache: KVCacheManager, sink: Sink,
        unprepared: Callable[[Request], Lack | None] = lambda request: None,
    ) -> None:  # fmt: skip
        self.sink = sink
        self._batch, self._num_events = bytearray(_BATCH_HEAD.size), 0
        self._steps = Returned([], [], [], [])                    # steps that are not encoded yet
        self._rates = UNMEASURED                                  # rates of the last kept step
        self._due_s = 0.0                                         # when to send next
        self._lacks: list[tuple[int, WaitReason, bool]] = []      # met by the step that is being planned
        self._num_left = _WHOLE_EVERY                             # kept steps that make the next plan a whole one

        def asked(request: Request) -> Lack | None:
            lack = unprepared(request)
            if lack is not None:
                self._lacks.append((request.request_id, *lack))
            return lack

        super().__init__(config, cache, unprepared=asked)
        self._told = self.step.plan.table_blocks                  # new blocks of the last plan told: its identity

    def close(self) -> None:
        """Send what is left, and end the record."""
        self._send()
        self.sink.close()

    def _tell(self, event: Sent) -> None:
        """Put an event behind the plan that has no result yet."""
        self._tell_plan()
        self._put(event)

    def _tell_plan(self) -> None:
        """Put the plan of the last step, if it was not told, behind the steps that are kept."""
        step, plan = self.step, self.step.plan
        if plan.table_blocks is self._told:
            return
        self._told = plan.table_blocks
        check: int | list[int] | None = None            # the planning has failed
        if step.is_planned:
            is_plain = plan.rows and len(self._steps.times) < self._num_left and not self._lacks
            check = plan.table_blocks if is_plain and not _changes_rows(plan) else whole_check(plan)
        lacks, self._lacks = self._lacks, []
        self._put(PlanChecked(step.now_s, check, lacks))
        if isinstance(check, int):
            self._num_left = _WHOLE_EVERY

    def _put(self, event: Sent) -> None:
        """Encode the steps that are kept, and an event."""
        self._put_steps()
        encode_into(event, self._batch, -1)
        self._num_events += 1
        self._num_left -= 1
        if len(self._batch) >= _SENT_BYTES:
            self._send()

    def _put_steps(self) -> None:
        """Encode the steps that are kept."""
        steps = self._steps
        if num_steps := len(steps.times):
            encode_into(steps, self._batch, -1)
            self._num_events += 1
            self._num_left -= num_steps
            self._steps, self._rates = Returned([], [], [], []), UNMEASURED

    def _send(self) -> None:
        """Send what was told."""
        self._put_steps()
        batch, self._batch = self._batch, bytearray(_BATCH_HEAD.size)
        _BATCH_HEAD.pack_into(batch, 0, len(batch) - LENGTH_BYTES, _LIST, self._num_events)
        self.sink.send(batch if self._num_events else b"")
        self._num_events = 0

    def add(self, request: Request) -> None:
        """Queue a request, as `Scheduler.add`."""
        super().add(request)
        self._tell(Added(request.arrived_s, msgspec.Raw(encode_event(add_message(request)))))

    def abort(self, request_id: int) -> bool:
        """End a request, as `Scheduler.abort`."""
        is_known = super().abort(request_id)
        if is_known:
            self._tell(RequestEnded(request_id))
            self._send()
        return is_known

    def finish(self, request_id: int, index: int) -> bool:
        """End one branch, as `Scheduler.finish`."""
        is_known = super().finish(request_id, index)
        if is_known:
            self._tell(RequestEnded(request_id, index))
        return is_known

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceDelta]:
        """Record a step, as `Scheduler.update`. Called in each step, so most of them take no other call."""
        now_s, blocks, steps = self.step.now_s, plan.table_blocks, self._steps
        if (
            result.logprobs is not None or result.rows or result.failures or result.prompt_logprobs or result.swap_s
            or plan.new_rows or plan.copies or plan.row_forks or plan.swap_outs
            or self._lacks or blocks is self._told or len(steps.times) >= self._num_left
        ):  # fmt: skip
            self._tell(Updated(msgspec.Raw(encode(_planned_by(result, self.queues.running)))))
        else:
            self._told = blocks
            if result.rates is not self._rates:
                self._rates = result.rates
                steps.measured.append((len(steps.times), result.rates, result.step_s, result.step_ratio))
            steps.times.append(now_s)
            steps.blocks.extend(blocks)
            steps.token_ids.extend(result.token_ids)
        if now_s >= self._due_s:
            self._due_s = now_s + _SENT_S
            self._send()
        return _update(self, plan, result)

    def _finish(self, request: Request, sequence: Sequence, *, is_whole: bool = True) -> None:
        super()._finish(request, sequence, is_whole=is_whole)
        if not self.queues.requests:
            self._send()

    def schedule_next(self) -> StepPlan | None:
        """Plan the step after the one under way, as `Scheduler.schedule_next`."""
        plan = super().schedule_next()
        self._tell(PlanChecked(None, None if plan is None else plan.table_blocks))
        return plan

    def _check_idle(self) -> None:
        super()._check_idle()
        self.step.is_planned = True
        self._tell_plan()

    def roll_back(self) -> list[int]:
        """Roll back a failed step, as `Scheduler.roll_back`."""
        self._tell(RolledBack())
        self._send()
        return super().roll_back()

    def requeue_running(self) -> None:
        """Preempt all running requests, as `Scheduler.requeue_running`."""
        super().requeue_running()
        self._tell(Requeued())

    def hold_all_but(self, request_ids: Collection[int]) -> None:
        """Keep all requests but these out of steps, as `Scheduler.hold_all_but`."""
        super().hold_all_but(request_ids)
        self._tell(Held(list(request_ids)))

    def release_all(self) -> None:
        """Let all requests take part in steps, as `Scheduler.release_all`."""
        super().release_all()
        self._tell(Held(None))


def _changes_rows(plan: StepPlan) -> bool:
    return bool(plan.new_rows or plan.copies or plan.row_forks or plan.swap_outs)


def _planned_by(result: StepResult, running: Iterable[Request]) -> StepResult:
    """Return a result without what no plan depends on."""
    searches = result.logprobs is not None and any(isinstance(request.task, BeamTask) for request in running)
    return msgspec.structs.replace(
        result, prompt_logprobs=[], logprobs=result.logprobs if searches else None,
        failures=dict.fromkeys(result.failures, ""), at_fault={},
    )  # fmt: skip


# --- the way to the recorder --------------------------------------------------------------------------------------


_MAX_UNSENT_BYTES = 64 << 20    # beyond, the recorder does not keep up, and the record ends
_END_TIMEOUT_S = 60.0           # for what the recorder has left to write: on a busy machine it gets little CPU time


class Line:
    """Sends events to a recorder's process, and never waits for it before the end."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        connection.setblocking(False)
        self._process, self._connection = process, connection
        self._is_over = False
        self._unsent = bytearray()

    def send(self, events: bytes | bytearray) -> None:
        """Send events, as many as the socket takes now, and others later."""
        if not self._is_over:
            self._unsent += events
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
            self._connection.settimeout(_END_TIMEOUT_S)
            self.send(b"")
        self._is_over = True
        self._connection.close()
        wait_or_kill([self._process], _END_TIMEOUT_S)

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
