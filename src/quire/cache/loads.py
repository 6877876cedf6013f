"""Loads: blocks that are filled from elsewhere while a request waits, and the leases that hold them. No clock, no I/O.

A request that would compute tokens that a source has, a store on a disk or another engine, waits while they are loaded
(`kv_load`). Its lease holds the blocks that were found in the cache and those that are being filled: a table, which
publishes what has been filled as any sequence does. From then on these are ordinary cached blocks: the request is
admitted with what is there. A block that cannot be read ends the load, and is computed. Leases are the first to be
given back when blocks are short.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.cache.block_pool import OutOfBlocksError
from quire.cache.kv_tickets import Tickets
from quire.cache.prefix_tree import PrefixMatch, Scope
from quire.cache.stored_keys import StoredKeys
from quire.core.kv_identity import NO_STATES, StateParts
from quire.core.sequence import KVTransfer

if TYPE_CHECKING:
    from quire.cache.disk_tier import DiskTier
    from quire.cache.manager import KVCacheManager

MAX_LOADS = 8            # requests that load at once; each load holds blocks
MIN_BLOCKS = 2           # fewer are computed
JOB_BYTES = 8 << 20      # one read: two milliseconds of copying
MAX_JOBS = 4             # reads at once


class Wanted(NamedTuple):
    """Prefix that a waiting request would compute: its first `num_tokens` tokens, and the rate of that, if known."""

    request_id: int
    scope: Scope
    token_ids: Sequence[int]
    num_tokens: int
    tokens_per_s: float | None = None
    transfer: KVTransfer | None = None   # the engine that has them; None: they may be on the disk


@dataclass(slots=True, eq=False)
class KVLoad(ABC):
    """The loading of blocks [first, num_blocks) of a request's tokens from a source; each has a subclass.

    The last of them may be parts of the state behind the others (`core.kv_identity.StateParts`): `state`.
    """

    source: "LoadSource"
    request_id: int
    first: int               # blocks before it were found in the cache
    num_blocks: int
    num_begun: int           # leading blocks that were found or are being read
    num_filled: int          # leading blocks that can be used
    num_jobs: int = field(default=0, init=False)      # reads under way
    is_over: bool = field(default=False, init=False)  # nothing more is read for it
    state: StateParts = field(default=NO_STATES, kw_only=True)

    @property
    def num_cached(self) -> int:
        """Leading blocks of tokens."""
        return self.num_blocks - self.state.num_parts

    @abstractmethod
    def same(self) -> "KVLoad | None":
        """Return a load under way that reads the first block of this one."""

    @abstractmethod
    def begin(self) -> None:
        """Keep what it reads."""

    @abstractmethod
    def record_read(self, start: int, stop: int, num_whole: int, *, is_used: bool) -> None:
        """Record a read of blocks [start, stop) that has ended, of which the first `num_whole` are good.

        `is_used`: they have been copied into the cache.
        """

    @abstractmethod
    def release(self) -> None:
        """Give up what it reads: it is over, and no read is under way."""


class LoadSource(Protocol):
    """Source that blocks are loaded from: a store on a disk, or other engines."""

    @property
    def is_ready(self) -> bool:
        """Return whether it may have anything, and answers."""

    def find(self, wanted: Wanted, num_found: int) -> KVLoad | None:
        """Return a load of what is there behind the first `num_found` blocks; None: nothing."""

    def is_worth(self, wanted: Wanted, match: PrefixMatch, load: KVLoad | None) -> bool:
        """Count a request that looks for tokens here once; return whether `load` is to be made."""

    def record_hit(self, num_tokens: int) -> None:
        """Count tokens that were loaded, of a request that is admitted with them."""

    def record_cancelled(self) -> None:
        """Count a load that was given up."""


class _Job(NamedTuple):
    """A read of blocks [start, stop) of a load."""

    load: KVLoad
    start: int
    stop: int


class Loads:
    """All loads of an engine, and what it keeps for loads of others.

    `disk`, `peers`: where blocks may be; None: there is no such source. `tickets`: None, nothing is kept for others.
    `stored_keys`: what sources, and those that read from here, know blocks by.
    """

    def __init__(self, cache: "KVCacheManager", block_bytes: int) -> None:
        assert cache.prefixes.can_be_found, "loads without a prefix cache"
        self._cache, self._size = cache, cache.block_size
        self._job_blocks = max(1, JOB_BYTES // block_bytes)
        self.disk: DiskTier | None = None
        self.peers: LoadSource | None = None
        self.tickets: Tickets | None = None
        self.stored_keys = StoredKeys(cache.block_size)
        self.others: list[DiskTier] = []          # tiers of sessions that are being restored, and of other engines
        self._loads: dict[int, KVLoad] = {}       # request id: until the request is admitted or ends
        self._looked_up = set[int]()              # waiting requests that load nothing more
        self._behind: dict[int, KVLoad] = {}      # waiting requests, and the load that each waits for
        self._jobs: dict[int, _Job] = {}
        self._next_job = 0

    @property
    def num_loads(self) -> int:
        """Loads under way."""
        return sum(not load.is_over for load in self._loads.values())

    def is_loading(self, request_id: int) -> bool:
        """Return whether a waiting request waits for a load, its own or another's."""
        load = self._loads.get(request_id) or self._behind.get(request_id)
        return load is not None and not load.is_over

    def begin(self, wanted: Wanted, match: PrefixMatch) -> bool:
        """Load what a source has behind a match of a request's first tokens; return whether it waits for that.

        A request loads once between two admissions. While others load the same, it waits for them, and looks again.
        """
        source: LoadSource | None = self._longest(wanted) if self.others else self.disk
        if wanted.transfer is not None:
            source = self.peers
        request_id, num_found = wanted.request_id, len(match.blocks)
        if source is None or request_id in self._looked_up or not source.is_ready:
            return False
        if wanted.num_tokens // self._size - num_found < MIN_BLOCKS:
            return False
        load = source.find(wanted, num_found)
        if load is not None and load.num_cached - num_found < MIN_BLOCKS:
            load = None
        if load is not None:
            other = load.same()
            if other is None and self.num_loads >= MAX_LOADS:
                other = next(each for each in self._loads.values() if not each.is_over)
            if other is not None and not other.is_over:
                self._behind[request_id] = other
                return True
        self._behind.pop(request_id, None)
        self._looked_up.add(request_id)
        if not source.is_worth(wanted, match, load) or load is None:
            return False
        try:
            with_state = load.state.num_parts > 0
            self._cache.lease(
                request_id, wanted.token_ids, wanted.scope, match, load.num_cached, with_state=with_state
            )
        except OutOfBlocksError:
            return False
        load.begin()
        self._loads[request_id] = load
        return True

    def _longest(self, wanted: Wanted) -> "DiskTier | None":
        """Return the store with the longest run of a request's tokens, the disk's if others have no more."""
        longest, most = self.disk, 0
        for source in (self.disk, *self.others):
            load = None if source is None or not source.is_ready else source.find(wanted, 0)
            if load is not None and load.num_cached > most:
                longest, most = source, load.num_cached
        return longest

    def next_read(self, source: LoadSource) -> tuple[int, KVLoad, int, int] | None:
        """Return a source's next read, to be begun at once: a job, the load, its blocks [start, stop). None: none."""
        if not self._loads or sum(job.load.source is source for job in self._jobs.values()) >= MAX_JOBS:
            return None
        load = next((each for each in self._loads.values() if each.source is source and self._is_due(each)), None)
        if load is None:
            return None
        start, stop = load.num_begun, min(load.num_begun + self._job_blocks, load.num_blocks)
        load.num_begun = stop
        load.num_jobs += 1
        self._next_job += 1
        self._jobs[self._next_job] = _Job(load, start, stop)
        return self._next_job, load, start, stop

    @staticmethod
    def _is_due(load: KVLoad) -> bool:
        # One is copied while the next is read.
        return not load.is_over and load.num_begun < load.num_blocks and load.num_jobs < 2

    def postpone(self, job: int) -> None:
        """Take back the read that `next_read` has returned last: the source cannot begin it now."""
        load, start, _ = self._jobs.pop(job)
        load.num_begun = start
        load.num_jobs -= 1

    def destinations(self, job: int) -> list[int]:
        """Return the blocks of the cache that a read that has ended is to be copied to; none if no one waits for it."""
        load, start, stop = self._jobs[job]
        if load.is_over or load.num_filled != start:
            return []
        found = self._cache.leased_blocks(load.request_id, start, min(stop, load.num_cached))
        if stop > load.num_cached and (slot := self._leased_slot(load)) is not None:
            found += load.state.numbers(slot, max(start - load.num_cached, 0), stop - load.num_cached)
        return found

    def end_read(self, job: int, num_whole: int) -> None:
        """Record a read: its first `num_whole` blocks are good, and have been copied to their destinations.

        Reads end in the order in which they were begun.
        """
        load, start, stop = self._jobs.pop(job)
        load.num_jobs -= 1
        is_used = not load.is_over and load.num_filled == start
        load.record_read(start, stop, num_whole, is_used=is_used)
        if is_used:
            load.num_filled = start + num_whole
            self._cache.fill_lease(load.request_id, min(load.num_filled, load.num_cached))
            if load.num_filled == load.num_blocks and load.state.num_parts:
                self._cache.publish_leased_state(load.request_id)
            if num_whole < stop - start or load.num_filled == load.num_blocks:
                self._end(load)
        else:
            assert load.is_over, f"a read of blocks {start} to {stop} of a load of which {load.num_filled} are filled"
            self._release(load)

    def _end(self, load: KVLoad) -> None:
        """End a load: what has not been filled is free."""
        load.is_over = True
        self._cache.trim_lease(load.request_id, min(load.num_filled, load.num_cached))
        self._release(load)

    def _leased_slot(self, load: KVLoad) -> int | None:
        return None if self._cache.states is None else self._cache.states.leased(load.request_id)

    @staticmethod
    def _release(load: KVLoad) -> None:
        if load.is_over and not load.num_jobs:
            load.release()

    def admit(self, request_id: int, scope: Scope, token_ids: Sequence[int], match: PrefixMatch) -> int:
        """End the lease of a request that is admitted with a match, and shares its blocks; return its loaded tokens.

        What it has found without a load is reused, and worth writing to a disk.
        """
        load = self._drop(request_id)
        num_found = len(match.blocks)
        num_loaded = 0 if load is None else max(0, min(num_found, load.num_filled) - load.first)
        if load is not None:
            load.source.record_hit(num_loaded * self._size)
        if self.disk is not None and num_found > num_loaded:
            self.disk.writes.add(scope, token_ids, num_found)
        return min(num_loaded * self._size, match.num_tokens)

    def end(self, request_id: int) -> None:
        """End the lease of a request that has ended, wherever it was."""
        self._drop(request_id)

    def _drop(self, request_id: int) -> KVLoad | None:
        self._looked_up.discard(request_id)
        self._behind.pop(request_id, None)
        load = self._loads.pop(request_id, None)
        if load is not None:
            if not load.is_over:
                self._end(load)
            self._cache.end_lease(request_id)
        return load

    def give_back(self, source: LoadSource | None = None) -> bool:
        """End all leases, or those of a source, for want of blocks or of answers; return whether there were any.

        What they have filled is cached.
        """
        request_ids = [each for each, load in self._loads.items() if source is None or load.source is source]
        for request_id in request_ids:
            self.cancel(request_id)
        return bool(request_ids)

    def cancel(self, request_id: int) -> None:
        """Give up a load, done or not: the request is admitted with what is there by then."""
        load = self._loads[request_id]
        if not load.is_over:
            load.source.record_cancelled()
        self._drop(request_id)
        self._looked_up.add(request_id)

    def checking(self) -> Iterator[None]:
        """Assert, in slices, that the sources are sound, and that leases, loads and reads agree."""
        kept = set() if self.tickets is None else self.tickets.lease_ids
        leased = self._cache.leases.keys()
        assert leased == self._loads.keys() | kept, f"leases of {leased}, but loads of {[*self._loads]}, tickets {kept}"
        for load in self._loads.values():
            assert load.first <= load.num_filled <= load.num_begun <= load.num_blocks, f"{load}"
        yield
        for tier in self.others if self.disk is None else (self.disk, *self.others):
            yield from tier.checking()
        if self.tickets is not None:
            yield from self.tickets.checking()
