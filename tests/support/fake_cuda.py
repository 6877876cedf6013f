"""Streams and events without a GPU: late wherever they may be, and checked for races.

The main stream works at once. Every other does nothing until somebody waits for it, so what is not waited for has not
happened yet. Vector clocks (Fidge 1988, Mattern 1989) tell whether two pieces of work on one place, of which one
writes, are ordered: if not, it is an AssertionError, whatever came first this time.
"""

import random
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager

import pytest

Clock = dict[int, int]  # stream -> how much of its work has been waited for


class FakeStream:
    """A queue of work, each piece with the clock at which it may begin."""

    def __init__(self, cuda: "FakeCuda", *, is_late: bool = True) -> None:
        self.cuda, self.is_late = cuda, is_late
        self.device = "fake"
        self.number = len(cuda.streams)
        cuda.streams.append(self)
        self.clock: Clock = {self.number: 0}
        self.num_done = 0
        self._waiting = deque[Callable[[], object]]()

    def add(self, work: Callable[[], object]) -> None:
        self.clock[self.number] += 1
        self._waiting.append(work)
        if not self.is_late:
            self.run_until(self.clock[self.number])

    def run_until(self, count: int) -> None:
        while self.num_done < count:
            self._waiting.popleft()()
            self.num_done += 1

    def come_after(self, event: "FakeEvent") -> None:
        for stream, count in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), count)

    def wait_event(self, event: "FakeEvent") -> None:
        self.come_after(event)
        self.add(event.synchronize)

    def wait_stream(self, other: "FakeStream") -> None:
        self.wait_event(FakeEvent(self.cuda).record(other))

    def synchronize(self) -> None:
        self.run_until(self.clock[self.number])


class FakeEvent:
    """A place in a stream's queue."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self._cuda = cuda
        self.clock: Clock = {}

    def record(self, stream: FakeStream | None = None) -> "FakeEvent":
        self._stream = stream or self._cuda.current
        self.clock = dict(self._stream.clock)
        return self

    def synchronize(self) -> None:
        self._stream.run_until(self.clock[self._stream.number])

    def query(self) -> bool:
        """Whether it has been reached: it may have been. Whatever the host does next comes after it then."""
        if self._cuda.chooser.random() < 0.2:
            self.synchronize()
        if self._stream.num_done < self.clock[self._stream.number]:
            return False
        for stream in self._cuda.streams:
            stream.come_after(self)
        return True

    def elapsed_time(self, _: "FakeEvent") -> float:
        return 1.0


class FakeCuda:
    """One device. `current` is the stream that work goes to."""

    def __init__(self, seed: int = 0) -> None:
        self.streams: list[FakeStream] = []
        self.main = self.current = FakeStream(self, is_late=False)
        self.chooser = random.Random(seed)
        self._written: dict[Hashable, tuple[int, int]] = {}  # place -> stream, and its count, of the last write there
        self._read: dict[Hashable, Clock] = {}               # since then, by stream

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        """Take the place of what torch.cuda has."""
        patch.setattr("torch.cuda.Stream", lambda device: FakeStream(self))
        patch.setattr("torch.cuda.Event", lambda enable_timing=False: FakeEvent(self))
        patch.setattr("torch.cuda.current_stream", lambda device: self.current)
        patch.setattr("torch.cuda.stream", self._on)

    @contextmanager
    def _on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def launch(
        self, work: Callable[[], object], reads: Iterable[Hashable] = (), writes: Iterable[Hashable] = ()
    ) -> None:
        """Give work to the current stream; it reads and writes these places."""
        stream = self.current
        stream.add(work)
        now = stream.clock[stream.number]
        for place in reads:
            self._check(stream, place, [self._written.get(place, (stream.number, 0))])
            self._read.setdefault(place, {})[stream.number] = now
        for place in writes:
            earlier = [self._written.get(place, (stream.number, 0)), *self._read.pop(place, {}).items()]
            self._check(stream, place, earlier)
            self._written[place] = stream.number, now

    @staticmethod
    def _check(stream: FakeStream, place: Hashable, earlier: list[tuple[int, int]]) -> None:
        for other, count in earlier:
            assert stream.clock.get(other, 0) >= count, f"a race on {place} between streams {other} and {stream.number}"
