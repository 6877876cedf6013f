"""Files of the plans before a fault: what an engine without a record leaves when a step fails.

They have no tokens, no results and no state to begin from, so `quire replay` shows the plans and cannot make them
again; a record (`--record`) can be repeated.
"""

import logging
import os
import time
import traceback
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import gettempdir

import msgspec

from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.options import parse_bytes
from quire.core.plan import StepPlan
from quire.core.sequence import Request
from quire.engine.engine import Engine, RecentPlans
from quire.engine.options import EngineOptions
from quire.engine.recording.record import (
    Closed,
    Fault,
    FaultRequest,
    Planned,
    RecordStart,
    chunk,
    encode_event,
    encode_plan,
    head,
    record_start,
)
from quire.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

MAX_FAULT_FILES = 16            # most in a folder; the oldest are removed
_MAX_REQUESTS = 1024
_MAX_FRAMES = 12


class FaultFiles:
    """Writes the recent plans of an engine, with the error that a step has raised, into files of `folder`.

    None: a folder of this user where the system has temporary files, which no other user may have made.
    """

    def __init__(self, start: RecordStart, folder: Path | None, recent: RecentPlans) -> None:
        self._is_own = folder is None
        self._folder = folder or Path(gettempdir()) / f"quire-faults-{os.geteuid()}"
        self._start, self._recent = start, recent
        self._written: BaseException | None = None

    def write(self, error: BaseException, scheduler: Scheduler) -> Path | None:
        """Write the plans, the requests and where `error` was raised into a file; None if that is not possible.

        The same error is written once. Its text is left out, for it may quote a request; the log has it.
        """
        if error is self._written:
            return None
        self._written = error
        began_s = time.monotonic()
        try:
            path, num_plans = self._write(error, scheduler)
        except Exception as failure:            # whatever state the scheduler is in: the error itself is what counts
            log.warning("the steps before a fault cannot be written to %s: %r", self._folder, failure)
            return None
        log.error(
            "the %d steps before the fault are in %s (%.0f ms); quire replay shows them", num_plans, path,
            (time.monotonic() - began_s) * 1e3,
        )  # fmt: skip
        return path

    def _write(self, error: BaseException, scheduler: Scheduler) -> tuple[Path, int]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = self._folder.lstat()
        if self._is_own and (facts.st_uid != os.geteuid() or facts.st_mode & 0o022):
            raise PermissionError("other users can write to it, or have made it")
        plans, num_plans, num_before = self._recent.events()
        fault = Fault(_where(error), num_before + 1, _requests(scheduler))
        events = encode_event(self._start), encode_event(fault), plans, encode_event(Closed("a fault"))
        name = f"fault-{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{os.getpid()}.quirelog"
        with os.fdopen(os.open(self._folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(head() + chunk(events, 3 + num_plans))
        for old in sorted(self._folder.glob("fault-*.quirelog"))[:-MAX_FAULT_FILES]:
            with suppress(FileNotFoundError):   # another engine removes it, too
                old.unlink()
        return self._folder / name, num_plans


def encode_whole(now_s: float, plan: StepPlan) -> bytes:
    """Return the event of a whole plan."""
    return encode_event(Planned(now_s, encode_plan(plan)))


def _where(error: BaseException) -> str:
    """Return the type of an error, and the functions that it went through, the innermost last."""
    frames = traceback.extract_tb(error.__traceback__)[-_MAX_FRAMES:]
    return "\n".join([type(error).__name__, *(f"  {each.filename}:{each.lineno} {each.name}" for each in frames)])


def _requests(scheduler: Scheduler) -> list[FaultRequest]:
    """Return the requests, those that run first, _MAX_REQUESTS at most."""
    queues = scheduler.queues
    running, swapped = {each.request_id for each in queues.running}, {each.request_id for each in queues.swapped}

    def state(request: Request) -> str:
        number = request.request_id
        return "running" if number in running else "swapped" if number in swapped else "waiting"

    order = {"running": 0, "swapped": 1, "waiting": 2}
    ranked = sorted(queues.requests.values(), key=lambda each: order[state(each)])
    return [
        FaultRequest(
            each.request_id, state(each), len(each.prompt_token_ids),
            [(branch.num_computed_tokens, branch.num_output_tokens, branch.row) for branch in each.live],
            each.num_preemptions, each is scheduler.step.at,
        )
        for each in ranked[:_MAX_REQUESTS]
    ]  # fmt: skip


def keep_recent_plans(engine: Engine, options: EngineOptions, config: SchedulerConfig, cache: CacheConfig) -> None:
    """Make an engine keep its plans, as the options say. The folder is made at the first fault."""
    if max_bytes := parse_bytes(options.fault_bytes, "fault_bytes", low=0):
        folder = None if options.fault_folder is None else Path(options.fault_folder)
        start = msgspec.structs.replace(record_start(options, config, cache), has_tokens=False, settings=None)
        engine.recent = RecentPlans(max_bytes, encode_whole)
        engine.recent.on_fault = FaultFiles(start, folder, engine.recent).write
