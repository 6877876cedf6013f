"""Replay of a record: its calls on a scheduler of its own, which must make the plans of the record."""

from collections.abc import Iterable, Iterator
from itertools import islice

from quire.core.deltas import SequenceDelta, WaitReason
from quire.core.plan import StepPlan, decode_result
from quire.core.sequence import Request
from quire.engine.messages import AddRequest, decode_command
from quire.engine.recording.record import (
    Added,
    Closed,
    Event,
    Fault,
    Held,
    PlanChecked,
    Planned,
    RecordError,
    RecordStart,
    Repeated,
    RequestEnded,
    Requeued,
    Resumed,
    RolledBack,
    Updated,
    encode_plan,
    whole_check,
)
from quire.engine.recording.snapshot import restore, snapshot
from quire.scheduling.scheduler import Scheduler, make_scheduler
from quire.scheduling.waiting_lines import Lack


class DifferenceError(Exception):
    """A step that is planned otherwise than in the record. Plans are encoded; None: there was none.

    `why`: the error of the replay, if it is one.
    """

    def __init__(self, step: int, recorded: bytes | None, planned: bytes | None, why: str = "") -> None:
        super().__init__(f"step {step}")
        self.step, self.recorded, self.planned, self.why = step, recorded, planned, why


class RecordReplay:
    """A scheduler that is given the events of a record, one after the other."""

    def __init__(self, start: RecordStart) -> None:
        self.scheduler = make_scheduler(start.scheduler, start.cache, self._unprepared)
        self.num_steps = self.num_sequence_steps = 0        # so far; a sequence counts in each step with it
        self.num_requests = 0
        self.first_step = 1                                 # where the record begins
        self._num_open = 0                                  # steps that were planned and are not over
        self.end: str | None = None                         # why the record ends; None: it does not, yet
        self.plan: bytes | None = None                      # the last one
        self.now_s = 0.0                                    # when the last step was planned, by the engine's clock
        self.deltas: list[SequenceDelta] = []               # the last step's that is over
        self._lacks: dict[int, Lack] = {}                   # met by the step that is planned next
        self._fault: Exception | None = None                # raised by the last event: a rollback follows

    def apply(self, event: Event) -> None:
        """Do what an event tells. DifferenceError if a plan differs, or the scheduler fails where it had not."""
        if self._fault is not None and not isinstance(event, RolledBack):
            raise DifferenceError(self.num_steps, None, None, repr(self._fault)) from self._fault
        scheduler = self.scheduler
        match event:
            case Planned(now_s, plan, lacks):
                self._plan(now_s, lacks, plan)
                if self.plan != plan:
                    raise DifferenceError(self.num_steps, plan, self.plan)
            case Updated(result):
                self._update(result)
            case Added(arrived_s, message):
                added = decode_command(message)
                assert isinstance(added, AddRequest), f"a request, not {added}"
                added.request.arrived_s = arrived_s
                scheduler.add(added.request)
                self.num_requests += 1
            case RequestEnded(request_id, index):
                _ = scheduler.abort(request_id) if index is None else scheduler.finish(request_id, index)
            case RolledBack():
                self._fault, self._num_open = None, 0
                scheduler.roll_back()
            case Requeued():
                scheduler.requeue_running()
            case Held(request_ids):
                scheduler.release_all() if request_ids is None else scheduler.hold_all_but(set(request_ids))
            case Resumed(state):
                self._resume(state)
            case Closed(reason):
                self.end = reason
            case RecordStart() | Fault() | Repeated():
                raise RecordError(f"a record with an event {type(event).__name__} where there is none")

    @property
    def is_between_steps(self) -> bool:
        """True if each step that was planned is over."""
        return self._num_open == 0 and self._fault is None

    def snapshot(self) -> bytes:
        """Return the state between two steps, for a `Resumed`."""
        assert self.is_between_steps, "in a step"
        return snapshot(self, (self.scheduler, self.num_steps, self.now_s))

    def _resume(self, state: bytes) -> None:
        """Continue from a snapshot. RecordError if it cannot be read, for whatever reason."""
        try:
            self.scheduler, self.num_steps, self.now_s = restore(state, self)
            assert isinstance(self.scheduler, Scheduler), "another object in place of the scheduler"
            self.first_step = int(self.num_steps) + 1
        except Exception as error:
            raise RecordError(f"the state at the beginning of the record cannot be read: {error!r}") from error

    def check(self, event: PlanChecked) -> Planned:
        """Plan a step, and return it as a record has it. DifferenceError if it is another one."""
        has_plan = event.check is not None
        plan = self._plan(event.now_s, event.lacks, b"" if has_plan else None)
        if event.check != (plan and (whole_check(plan) if isinstance(event.check, int) else plan.table_blocks)):
            raise DifferenceError(self.num_steps, None, self.plan, "another plan, or one shortly before")
        return Planned(event.now_s, self.plan, event.lacks)

    def check_blocks(self, now_s: float, blocks: Iterator[int]) -> Planned:
        """Plan a step, and take its new blocks, as `check`."""
        plan = self._plan(now_s, (), b"")
        if plan is None or plan.table_blocks != list(islice(blocks, len(plan.table_blocks))):
            raise DifferenceError(self.num_steps, None, self.plan, "another plan, or one shortly before")
        return Planned(now_s, self.plan)

    def _plan(
        self, now_s: float | None, lacks: Iterable[tuple[int, WaitReason, bool]], recorded: bytes | None
    ) -> StepPlan | None:
        """Plan a step, by `schedule_next` without a time. `recorded` is None if that may fail, or give no plan."""
        if self._fault is not None:
            raise DifferenceError(self.num_steps, recorded, None, repr(self._fault)) from self._fault
        self._lacks = {request_id: Lack(reason, is_for_all) for request_id, reason, is_for_all in lacks}
        plan: StepPlan | None = None
        is_known = self._num_open > 0 and now_s is not None             # it was planned while another ran
        self.plan = None
        try:
            if now_s is None:
                plan = self.scheduler.schedule_next()
            else:
                self.now_s = now_s
                plan = self.scheduler.schedule(now_s)
        except Exception as error:
            if recorded is not None or now_s is None:
                raise DifferenceError(self.num_steps + 1, recorded, None, repr(error)) from error
            self._fault = error
            return None
        self._num_open += plan is not None and bool(plan.rows) and not is_known
        if now_s is not None and plan is not None and plan.rows:
            self.num_steps += 1
            self.num_sequence_steps += len(plan.rows)
        self.plan = None if plan is None else encode_plan(plan)
        return plan

    def _update(self, result: bytes) -> None:
        self._num_open -= 1
        try:
            self.deltas = self.scheduler.update(self.scheduler.step.plan, decode_result(result))
        except Exception as error:  # as when it was recorded, if a rollback follows
            self._fault = error

    def _unprepared(self, request: Request) -> Lack | None:
        return self._lacks.get(request.request_id)
