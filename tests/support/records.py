"""Records of schedulers that a harness drives, and of engines."""

import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.frames import LENGTH_BYTES
from quire.core.sequence import Request
from quire.core.version import __version__
from quire.engine.recording.record import (
    Closed,
    Event,
    RecordError,
    RecordStart,
    decode_sent,
    read_record,
)
from quire.engine.recording.recorded_scheduler import RecordedScheduler
from quire.engine.recording.recorder import Recorder
from quire.engine.recording.replay import RecordReplay
from quire.scheduling.scheduler import Scheduler, make_cache
from quire.scheduling.waiting_lines import Lack
from support import scheduling
from support.server import wait_until

MAX_BYTES = 1 << 30


class _Sink:
    """Gives events to a recorder of this process, as a line gives them to one of another."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def send(self, events: bytes | bytearray) -> None:
        for event in decode_sent(events[LENGTH_BYTES:]) if events else ():
            self._recorder.put(event)

    def close(self) -> None:
        assert not self._recorder.is_over, "a step was not repeatable"
        self._recorder.close()


class Records:
    """Records the schedulers of all harnesses that are made from now on, each in a file of its own."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, keeps_tokens: bool = False, max_bytes: int = MAX_BYTES
    ) -> None:
        self._folder, self._keeps_tokens, self._max_bytes = folder, keeps_tokens, max_bytes
        self.recorder: Recorder | None = None       # the latest harness's
        self._scheduler: RecordedScheduler | None = None
        self._num_made = 0
        monkeypatch.setattr(scheduling, "make_scheduler", self._make)

    def _make(
        self, config: SchedulerConfig, cache: CacheConfig, unprepared: Callable[[Request], Lack | None]
    ) -> Scheduler:
        self._num_made += 1
        start = RecordStart(__version__, config, cache, self._keeps_tokens)
        recorder = self.recorder = Recorder(start, self._folder, str(self._num_made), self._max_bytes)
        self._scheduler = RecordedScheduler(config, make_cache(cache), _Sink(recorder), unprepared)
        return self._scheduler

    @property
    def path(self) -> Path:
        """The file of the latest record, or the last one of several."""
        assert self.recorder is not None, "a harness was made"
        return self.recorder.paths[-1]

    def close(self) -> Path:
        """End the latest record, which must be whole; return its file."""
        assert self._scheduler is not None, "a harness was made"
        self._scheduler.close()
        return self.path


def events_of(path: Path) -> list[Event]:
    """Return the events of a file."""
    return [event for _, event in read_record(path)]


def whole_record(folder: Path) -> list[Event]:
    """Wait for the end of the only record of a folder, after the end of its engine."""
    found = list[Event]()

    def is_whole() -> bool:
        with suppress(RecordError):         # it is being written
            found[:] = [event for path in folder.glob("*.quirelog") for event in events_of(path)]
        return bool(found) and isinstance(found[-1], Closed)

    wait_until(is_whole)
    return found


def unpacked(path: Path) -> list[bytes]:
    """Return the contents of a file's chunks."""
    content, offset, chunks = path.read_bytes(), 10, []
    while offset < len(content):
        length = int.from_bytes(content[offset : offset + 4], "big")
        chunks.append(zlib.decompress(content[offset + 20 : offset + 20 + length]))
        offset += 20 + length
    return chunks


def replayed(events: list[Event]) -> RecordReplay:
    """Return the replay of a whole record."""
    start, *others = events
    assert isinstance(start, RecordStart)
    run = RecordReplay(start)
    for event in others:
        run.apply(event)
    return run
