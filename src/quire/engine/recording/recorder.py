"""Recorder: takes a scheduler's events, seals and replays them, and writes those that repeat into a file.

It runs in a process of its own (`python -m quire.engine.recording.recorder`), which outlives the engine: what the
engine has sent before it ended, however it did, is written. Sealing costs a microsecond a token, and replaying what
scheduling costs, so neither is work of the engine.
"""

import logging
import os
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import IO

import msgspec

from quire.core.frames import read_frame
from quire.core.plan import UNMEASURED, MeasuredRates, StepResult, decode_result, encode
from quire.engine.messages import AddRequest, add_message, decode_command
from quire.engine.recording.record import (
    Added,
    Closed,
    Event,
    PlanChecked,
    Recording,
    RecordStart,
    Resumed,
    Returned,
    RolledBack,
    Sent,
    Updated,
    chunk,
    decode_sent,
    encode_event,
    head,
)
from quire.engine.recording.replay import DifferenceError, RecordReplay
from quire.engine.recording.sealing import Sealer

log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 18           # uncompressed events
_KEPT_FILES = 2
_NICENESS = 10                   # the engine has the CPU first
_MOST_FAULTS = 4                 # files with a failed step that are kept besides
_MOST_STATE = 0.25               # share of the bound that the state of a scheduler may take


class Recorder:
    """Writes the record of one scheduler into files of at most half of `max_bytes`, of which the latest two are kept.

    Their names are `name` with a number behind it. Each is a record by itself: it begins with the state of then. The
    first files in which a step fails, _MOST_FAULTS at most, stay under another name as well.
    """

    def __init__(self, start: RecordStart, folder: Path, name: str, max_bytes: int) -> None:
        self._replay = RecordReplay(start)
        self._sealer = Sealer(self._replay.scheduler, keeps_tokens=start.has_tokens)
        self._start, self._max_bytes = start, max_bytes
        self._folder, self._name = folder, name
        self._num_files = self._num_bytes = 0
        self._with_faults = set[Path]()     # files in which a step has failed
        self._events = list[bytes]()
        self._num_pending = 0
        self.is_over = False        # nothing more is written
        self._file = self._open()

    @property
    def paths(self) -> list[Path]:
        """The files that are kept, the one being written last."""
        numbers = range(max(0, self._num_files - 2), self._num_files)
        return [self._folder / f"{self._name}-{number}.quirelog" for number in numbers]

    def put(self, event: Sent) -> None:
        """Take the next event."""
        if self.is_over:
            return
        try:
            for sealed in self._sealed(event):
                self._put(sealed)
        except DifferenceError as difference:
            self.close(f"step {difference.step} could not be repeated: {difference.why or 'another plan'}")

    def _put(self, event: Event) -> None:
        if self.is_over:
            return
        encoded = encode_event(event)
        self._events.append(encoded)
        self._num_pending += len(encoded)
        if isinstance(event, RolledBack):
            self._keep()
        if self._num_pending >= _CHUNK_BYTES:
            self.flush()
        if self._num_bytes >= self._max_bytes // 2 and self._replay.is_between_steps:
            self._go_on()

    def flush(self) -> None:
        """Write what was taken."""
        if self._events and not self.is_over:
            written, self._events, self._num_pending = chunk(self._events), [], 0
            self._write(written)

    def close(self, reason: str = "") -> None:
        """Write what was taken, and end the file. `reason`: why it ends before the engine."""
        if self.is_over:
            return
        if reason:
            log.warning("the record ends: %s", reason)
        self.is_over = True
        self._end_file(reason)

    def _keep(self) -> None:
        """Give the file a second name, as a step has failed in it."""
        path = self.paths[-1]
        if path not in self._with_faults and len(self._with_faults) < _MOST_FAULTS:
            self._with_faults.add(path)
            path.with_name(f"fault-{path.name}").hardlink_to(path)

    def _go_on(self) -> None:
        """End the file, and begin the next one with the state of the scheduler."""
        state = encode_event(Resumed(self._replay.snapshot()))
        if len(state) > self._max_bytes * _MOST_STATE:
            self.close(f"of {self._max_bytes} bytes, its bound, the state of the scheduler takes {len(state)}")
            return
        self._end_file("it goes on in the next file")
        if self._num_files >= _KEPT_FILES:
            self.paths[0].unlink(missing_ok=True)
        self._file = self._open(state)

    def _open(self, *state: bytes) -> IO[bytes]:
        path = self._folder / f"{self._name}-{self._num_files}.quirelog"
        file = os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")
        self._num_files += 1
        self._events, self._num_pending = [encode_event(self._start), *state], 0
        file.write(head())
        self._num_bytes = 0
        return file

    def _end_file(self, reason: str) -> None:
        self._write(chunk([*self._events, encode_event(Closed(reason))]))
        self._file.close()

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._file.flush()
        self._num_bytes += len(content)

    def _sealed(self, event: Sent) -> Iterator[Event]:
        """Replay an event; yield what the file has of it."""
        if isinstance(event, Returned):
            yield from self._steps(event)
        elif isinstance(event, PlanChecked):
            yield self._replay.check(event)
        elif isinstance(event, Updated):
            yield self._result(decode_result(event.result))
        else:
            if isinstance(event, Added):
                added = decode_command(event.request)
                assert isinstance(added, AddRequest), f"a request, not {added}"
                sealed = self._sealer.request(added.request)
                event = Added(event.arrived_s, msgspec.Raw(encode_event(add_message(sealed))))
            self._replay.apply(event)
            yield event

    def _steps(self, steps: Returned) -> Iterator[Event]:
        blocks, token_ids = iter(steps.blocks), iter(steps.token_ids)
        measured = {place: (rates, step_s, step_ratio) for place, rates, step_s, step_ratio in steps.measured}
        latest: tuple[MeasuredRates, float | None, float | None] = UNMEASURED, None, None
        for place, now_s in enumerate(steps.times):
            yield self._replay.check_blocks(now_s, blocks)
            rates, step_s, step_ratio = latest = measured.get(place, latest)
            tokens = list(islice(token_ids, len(self._replay.scheduler.step.sampled)))
            yield self._result(StepResult(tokens, rates=rates, step_s=step_s, step_ratio=step_ratio))

    def _result(self, result: StepResult) -> Updated:
        sealed = Updated(msgspec.Raw(encode(self._sealer.result(result))))
        self._replay.apply(sealed)
        return sealed


def main() -> None:
    """Record what comes from the socket with the number given as the only argument, until it ends."""
    logging.basicConfig(format="%(asctime)s %(levelname)s recorder: %(message)s")
    os.nice(_NICENESS)
    events = socket.socket(fileno=int(sys.argv[1])).makefile("rb")
    if (first := read_frame(events)) is None:
        return
    recording = msgspec.msgpack.decode(first, type=Recording)
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}"
    recorder = Recorder(recording.start, Path(recording.folder), name, recording.max_bytes)
    while not recorder.is_over and (sent := read_frame(events)) is not None:
        for event in decode_sent(sent):
            recorder.put(event)
    recorder.close()


if __name__ == "__main__":
    main()
