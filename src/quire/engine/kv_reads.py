"""Reads of blocks for loads: begun, timed and copied into the cache by the engine's thread between two steps.

A block that is filled belongs to a lease, and no step is under way that could touch it, so plans do not mention it. The
reader, a store on a disk or a connection to another engine, reads in threads of its own.
"""

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from quire.cache.loads import KVLoad, Loads, LoadSource

READ_LIMIT_S = 5.0      # a read that takes longer is late: loads from its source are given up
LOOK_S = 1.0            # counts at most between two looks: the time in which this process was stopped is not the read's

L = TypeVar("L", bound=KVLoad)


class EndedRead(Protocol):
    """A read that has ended: a job, and how many of its first blocks can be taken."""

    @property
    def job(self) -> int:
        """The number of the read."""

    @property
    def num_whole(self) -> int:
        """Blocks that can be taken."""

    @property
    def num_bytes(self) -> int:
        """Bytes of those blocks."""


class BlockMemory(Protocol):
    """Memory of reads that have ended."""

    def take_into(self, job: int, destinations: Sequence[int]) -> None:
        """Copy the first blocks of a read into blocks of the cache, and release its memory."""

    def drop(self, job: int) -> None:
        """Release the memory of a read: its blocks will not be taken."""


class BlockReads(Generic[L]):
    """The reads of one source. `begin_read`: of a job, a load and its blocks [start, stop); False: not now."""

    def __init__(
        self, loads: Loads, source: LoadSource, begin_read: Callable[[int, L, int, int], bool], reader: BlockMemory,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._loads, self._source, self._begin_read, self._reader, self._clock = (
            loads, source, begin_read, reader, clock
        )  # fmt: skip
        self._begun: dict[int, float] = {}     # when each job was begun, the oldest first
        self._oldest, self._waited_s, self._looked_s = -1, 0.0, 0.0     # a job, what counts of its time, the last look
        self.num_bytes, self.seconds = 0, 0.0  # since start

    def __len__(self) -> int:
        """Count the reads under way."""
        return len(self._begun)

    def are_late(self) -> bool:
        """Look whether the oldest read takes longer than READ_LIMIT_S; LOOK_S counts at most since the last look."""
        if (job := next(iter(self._begun), None)) is None:
            return False
        if job != self._oldest:
            self._oldest, self._waited_s, self._looked_s = job, 0.0, self._begun[job]
        now_s = self._clock()
        self._waited_s += min(now_s - self._looked_s, LOOK_S)
        self._looked_s = now_s
        return self._waited_s > READ_LIMIT_S

    def begin(self) -> None:
        """Begin what is due, until the reader has no memory for more."""
        while (read := self._loads.next_read(self._source)) is not None:
            job, load, start, stop = read
            if not self._begin_read(job, load, start, stop):  # type: ignore[arg-type]  # a load of this source
                self._loads.postpone(job)
                return
            self._begun[job] = self._clock()

    def end(self, ended: EndedRead) -> float | None:
        """Copy what was read to where it is wanted; return the blocks per second of the read, None without any."""
        job, num_whole = ended.job, ended.num_whole
        destinations = self._loads.destinations(job)
        if destinations:
            self._reader.take_into(job, destinations[:num_whole])
        else:
            self._reader.drop(job)
        self._loads.end_read(job, num_whole)
        seconds = self._clock() - self._begun.pop(job)
        self.seconds += seconds
        self.num_bytes += ended.num_bytes
        return num_whole / seconds if num_whole and seconds > 0 else None
