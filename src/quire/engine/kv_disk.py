"""KVDisk: the moves between a KV cache and its store on a disk, made by the engine's thread between two steps.

The tier decides (`quire.cache.disk_tier`), the store reads and writes in threads of its own
(`quire.execution.kv_store`). A block that is copied out is complete and has no writer, one that is copied in belongs to
a lease: no step is under way that could touch either, so plans do not mention them. Copying is bounded in time per
step, and nothing waits for the disk.
"""

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from quire.cache.disk_tier import DiskTier, StoredLoad
from quire.cache.loads import Loads
from quire.engine.kv_reads import LOOK_S, READ_LIMIT_S, BlockReads

if TYPE_CHECKING:
    from quire.engine.kv_sessions import KVSessions
    from quire.execution.kv_store import KVStore

log = logging.getLogger(__name__)

MAX_COPY_S = 0.001      # copying out between two steps, at most; one block is always copied
COPY_SHARE = 0.05       # share of the last step's time
DRAIN_S = 2.0           # for queued blocks at the end
RATE_WEIGHT = 0.2       # weight of a new measurement in the average of a rate


class KVDisk:
    """A tier of loads, and its store. `clock` returns seconds."""

    def __init__(
        self, loads: Loads, tier: DiskTier, store: "KVStore", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.tier, self._loads, self._store, self._clock = tier, loads, store, clock
        # Not a method: the store of a session is freed with this object, and a circle would keep it until a collection.
        self._reads = BlockReads[StoredLoad](loads, tier, partial(_begin_read, store), store, clock)
        self.others: list[KVDisk] = []         # stores that are only read: of sessions, and of other engines
        self.sessions: KVSessions | None = None  # None: none are saved
        self.last_step_s = math.inf            # seconds of the engine's last step
        self._num_writing = 0
        self._most_writing = math.inf          # more is under way: nothing is copied out, since the store was full
        self._num_written_bytes = 0
        self._write_s = 0.0

    @property
    def num_left(self) -> int:
        """Number of operations left for an idle engine: runs of blocks to write, writes that will end, and sessions."""
        num_sessions = 0 if self.sessions is None else self.sessions.num_left
        return len(self.tier.writes) + self._num_writing + num_sessions

    @property
    def is_reading(self) -> bool:
        """Return whether a read is under way."""
        return len(self._reads) > 0

    def step(self) -> None:
        """Record what the disk has done, and give it more to do. For between two steps."""
        if self._num_writing or len(self._reads):
            self._collect()
            if not self.tier.is_stalled and self._reads.are_late():
                log.warning("a read of KV blocks takes more than %g s; none is begun until it ends", READ_LIMIT_S)
                self.tier.is_stalled = True
                self._loads.give_back(self.tier)
        self._reads.begin()
        for other in self.others:
            other.step()
        if self.sessions is not None and self.sessions.num_left:
            self.sessions.step(min(MAX_COPY_S, COPY_SHARE * self.last_step_s))
        if len(self.tier.writes) and self._num_writing <= self._most_writing:
            self._write(min(MAX_COPY_S, COPY_SHARE * self.last_step_s))
        elif self.tier.stored.forgotten:
            self._store.forget(self.tier.stored.take_forgotten())

    def wait(self, timeout_s: float) -> None:
        """Wait until a read or a write has ended; while one from another store is under way, such a one."""
        reading = next((other for other in self.others if other.is_reading), self)
        reading._store.wait(timeout_s)

    def add_other(self, tier: DiskTier, store: "KVStore") -> "KVDisk":
        """Load from another store as well; its loads are counted with those of this one."""
        tier.counts = self.tier.counts
        self._loads.others.append(tier)
        self.others.append(other := KVDisk(self._loads, tier, store))
        return other

    def remove_other(self, other: "KVDisk") -> None:
        """Begin no more loads from another store. Its last reads may be under way."""
        self._loads.give_back(other.tier)
        self._loads.others.remove(other.tier)
        self.others.remove(other)

    def count_reads_of(self, other: "KVDisk") -> None:
        """Count the reads of another store that is closed, which has the counts of this tier."""
        self._reads.num_bytes += other._reads.num_bytes
        self._reads.seconds += other._reads.seconds

    def _collect(self) -> None:
        from quire.execution.kv_store import Written  # noqa: PLC0415 (needs the extension)

        for ended in self._store.finished():
            if isinstance(ended, Written):
                self._num_writing -= 1
                self._write_s += ended.seconds
                self._num_written_bytes += ended.num_bytes if ended.is_whole else 0
                self.tier.writes.end(ended.slot, is_ok=ended.is_whole)
            else:
                rate = self._reads.end(ended)
                self.tier.is_stalled = False
                if rate is not None:
                    before = self.tier.blocks_per_s
                    self.tier.blocks_per_s = rate if before is None else before + RATE_WEIGHT * (rate - before)

    def _write(self, most_s: float) -> None:
        """Copy blocks out, one at least, until the time is over or the store has no room for more."""
        tier, store, started_s = self.tier, self._store, self._clock()
        self._most_writing = math.inf
        if not store.is_on:
            tier.writes.clear()
            return
        blocks = tier.writes.blocks()
        for block, source in blocks:
            if tier.stored.forgotten:
                store.forget(tier.stored.take_forgotten())
            if not store.begin_write(block, source):
                tier.writes.postpone(block.slot)
                self._most_writing = self._num_writing // 2     # each try looks up the whole run
                break
            self._num_writing += 1
            if self._clock() - started_s > most_s:
                break
        blocks.close()

    def stats(self) -> dict[str, float]:
        """Return the state of the tier, and its counts since start: `KVStats.disk`."""
        tier, counts = self.tier, self.tier.counts
        return {
            "is_on": float(self._store.is_on and not tier.is_stalled),
            "slots": tier.stored.num_slots, "stored_blocks": len(tier.stored), "bytes": self._store.num_bytes,
            "written_blocks": counts.num_written, "written_bytes": self._num_written_bytes, "write_s": self._write_s,
            "dropped_blocks": counts.num_dropped, "failed_blocks": counts.num_failed_writes,
            "evicted_blocks": tier.stored.num_evicted,
            "loaded_blocks": counts.num_loaded, "loaded_bytes": self._reads.num_bytes,
            "load_s": self._reads.seconds,
            "bad_blocks": counts.num_bad, "cancelled_loads": counts.num_cancelled, "slower_loads": counts.num_slower,
            "queries_tokens": counts.num_queried_tokens, "hits_tokens": counts.num_hit_tokens,
        }  # fmt: skip

    def drain(self, timeout_s: float = DRAIN_S) -> None:
        """Write what is queued, as far as the time and the rate allow. No step is under way.

        Time in which the machine stops this process does not count: between two looks there is at most LOOK_S.
        """
        waited_s, looked_s = 0.0, self._clock()
        while self.num_left and waited_s < timeout_s:
            self.step()
            if self.num_left:
                self.wait(0.005)
            now_s = self._clock()
            waited_s, looked_s = waited_s + min(now_s - looked_s, LOOK_S), now_s

    def close(self) -> None:
        """Give up what is under way for sessions, drain, and close the store. Idempotent."""
        if self.sessions is not None:
            self.sessions.close()
        self.drain()
        for disk in (self, *self.others):
            disk._store.close()

    def close_store(self) -> None:
        """Write what has been copied out, and close the store: another thread may call it as the process ends."""
        self._store.close()


def _begin_read(store: "KVStore", job: int, load: StoredLoad, start: int, stop: int) -> bool:
    """Begin a read of a store; False: it has no memory for it now."""
    return store.begin_read(job, load.records(start, stop))
