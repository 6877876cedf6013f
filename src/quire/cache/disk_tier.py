"""DiskTier: the decisions of a disk tier: blocks to write, blocks to load, and leases. No clock, no I/O.

Blocks are written when they are likely to be asked for again: those of a prefix that a request has found in the cache,
and those of a finished request, which its next turn begins with. Such a run of tokens is queued; its blocks are looked
up again when they are copied, so a queued run keeps no block and slows down no eviction.

A request that would compute tokens that are stored waits while they are loaded (`kv_load`). Its lease holds the blocks
that were found in the cache and those that are being filled: a table, which publishes what has been filled as any
sequence does. From then on these are ordinary cached blocks: the request is admitted with what is there. A block that
cannot be read ends the load, and is computed. Leases are the first to be given back when blocks are short.
"""

from array import array
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from quire.cache.block_pool import OutOfBlocksError
from quire.cache.prefix_tree import PrefixMatch, Scope, as_bytes
from quire.cache.stored_blocks import StoredBlocks
from quire.core.config import DiskWritePolicy
from quire.core.kv_identity import StoredBlock

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire.cache.manager import KVCacheManager

MAX_LOADS = 8            # requests that load at once; each load holds blocks
MIN_BLOCKS = 2           # fewer are computed
MAX_QUEUED_BYTES = 16 << 20  # tokens of queued runs, 4 bytes each: 4 million
JOB_BYTES = 8 << 20      # one read: two milliseconds of copying
MAX_JOBS = 4             # reads at once
RETRY = 16               # one of so many loads that seem slower than computing is made, to measure again
TRUSTED_BLOCKS = 64      # loaded, before their rate counts
MAX_KEYS = 4096          # scopes with keys in memory
_TOKEN_BYTES = 4


@dataclass(slots=True, eq=False)
class _Load:
    """The blocks that are loaded for a request: those of `path` from `first` on."""

    request_id: int
    scope: bytes
    packed: bytes
    path: list[int]          # slots
    first: int               # blocks before it were found in the cache
    num_begun: int           # leading blocks of the path that were found or are being read
    num_filled: int          # usable tokens
    num_jobs: int = 0        # reads under way
    is_over: bool = False    # nothing more is read for it


class _Job(NamedTuple):
    """A read of blocks [start, stop) of a load's path."""

    load: _Load
    start: int
    stop: int


class _QueuedRun(NamedTuple):
    """Tokens of a scope, with blocks that are to be written if they are still in the cache."""

    scope: Scope
    key: bytes
    packed: bytes


class TierCounts:
    """Counts since start, in blocks unless named otherwise."""

    __slots__ = ("num_bad", "num_cancelled", "num_dropped", "num_failed_writes", "num_hit_tokens", "num_loaded",
                 "num_queried_tokens", "num_slower", "num_written")  # fmt: skip

    def __init__(self) -> None:
        self.num_written = self.num_failed_writes = 0
        self.num_dropped = 0          # candidates that were not written: evicted first, or the queue or store was full
        self.num_loaded = 0
        self.num_bad = 0              # read, and not what was written
        self.num_cancelled = 0        # loads that were given up: for blocks, or because they took too long
        self.num_slower = 0           # loads that were not begun, since computing takes less time
        self.num_queried_tokens = 0   # looked up in the store, behind what the cache has
        self.num_hit_tokens = 0       # loaded, of requests that were admitted with them


class _ScopeKeys(dict[Scope, bytes]):
    """Keys of the roots of scopes in a store, the last MAX_KEYS or fewer of them."""

    def __init__(self, scope_key: "Callable[[bytes], bytes]") -> None:
        super().__init__()
        self._scope_key = scope_key

    def __missing__(self, scope: Scope) -> bytes:
        if len(self) >= MAX_KEYS:
            self.clear()
        key = self[scope] = self._scope_key(scope_text(scope))
        return key


class WriteQueue:
    """Runs of blocks that are to be written, in bounded memory."""

    def __init__(
        self, cache: "KVCacheManager", stored: StoredBlocks, keys: _ScopeKeys, counts: TierCounts,
        policy: DiskWritePolicy,
    ) -> None:  # fmt: skip
        self._cache, self._stored, self._keys, self._counts = cache, stored, keys, counts
        self._policy, self._size = policy, cache.block_size
        self._runs, self._num_bytes = deque[_QueuedRun](), 0

    def __len__(self) -> int:
        """Count the runs."""
        return len(self._runs)

    def finish(self, scope: Scope, token_ids: Sequence[int], num_computed: int, *, is_whole: bool) -> None:
        """Add the blocks of a sequence that has ended. `is_whole`: with its last token."""
        if self._policy == "all" or (is_whole and self._policy == "finished"):
            self.add(scope, token_ids, num_computed // self._size)

    def add(self, scope: Scope, token_ids: Sequence[int], num_blocks: int) -> None:
        """Add the first blocks of a sequence."""
        if not num_blocks or not self._stored.num_slots:
            return
        run = _QueuedRun(scope, self._keys[scope], as_bytes(token_ids[: num_blocks * self._size]))
        self._runs.append(run)
        self._num_bytes += len(run.packed)
        while self._num_bytes > MAX_QUEUED_BYTES:
            self._pop(num_stored=0)

    def blocks(self) -> Generator[tuple[StoredBlock, int], None, None]:
        """Yield the blocks to write, each with its block in the cache, to be copied before the next one is asked for.

        For between two steps. Close the generator when enough has been copied; `postpone` a block that could not be,
        and close it.
        """
        stored = self._stored
        while self._runs:
            run = self._runs[0]
            path = stored.path(run.key, run.packed)
            stored.touch(path)
            if len(path) * self._size * _TOKEN_BYTES < len(run.packed):
                blocks = self._cache.prefixes.blocks_of(array("i", run.packed), run.scope)
                try:
                    while len(path) < len(blocks) and stored.add(path, run.key, run.packed) is not None:
                        yield stored.record(path, len(path) - 1, run.key, run.packed), blocks[len(path) - 1]
                finally:
                    stored.touch(path)
            self._pop(len(path))

    def end(self, slot: int, *, is_ok: bool) -> None:
        """Record a write that has ended."""
        self._counts.num_written += is_ok
        self._counts.num_failed_writes += not is_ok
        self._stored.end_write(slot, is_ok=is_ok)

    def postpone(self, slot: int) -> None:
        """Take back the block that `blocks` has yielded last: the store has no room for its bytes now."""
        self._stored.end_write(slot, is_ok=False)

    def clear(self) -> None:
        """Drop all runs: the store takes no more."""
        while self._runs:
            self._pop(num_stored=0)

    def _pop(self, num_stored: int) -> None:
        """Remove the first run; what is not stored of it is dropped."""
        num_bytes = len(self._runs.popleft().packed)
        self._num_bytes -= num_bytes
        self._counts.num_dropped += num_bytes // (_TOKEN_BYTES * self._size) - num_stored

    def check(self) -> None:
        """Assert that the bytes of all runs are counted."""
        assert self._num_bytes == sum(len(run.packed) for run in self._runs)


class DiskTier:
    """Decides what is written to a store and loaded from it. `scope_key`: of the store, 32 bytes of a scope's text."""

    def __init__(
        self, cache: "KVCacheManager", stored: StoredBlocks, scope_key: "Callable[[bytes], bytes]",
        block_bytes: int, policy: DiskWritePolicy = "finished",
    ) -> None:  # fmt: skip
        assert cache.prefixes.can_be_found, "a disk tier without a prefix cache"
        self._cache, self.stored = cache, stored
        self._keys = _ScopeKeys(scope_key)
        self._size, self._job_blocks = cache.block_size, max(1, JOB_BYTES // block_bytes)
        self._loads: dict[int, _Load] = {}         # request id: until the request is admitted or ends
        self._looked_up = set[int]()               # waiting requests that load nothing more
        self._behind: dict[int, _Load] = {}        # waiting requests, and the load that each waits for
        self._jobs: dict[int, _Job] = {}
        self._readers: dict[int, _Load] = {}       # the load of each slot that is read for one
        self._next_job = 0
        self.counts = TierCounts()
        self.writes = WriteQueue(cache, stored, self._keys, self.counts, policy)
        self.blocks_per_s: float | None = None     # speed of loads, measured by the caller
        self.is_stalled = False                    # set by the caller: reads do not return, so none is begun

    # --- loads ----------------------------------------------------------------------------------------------------

    @property
    def num_loads(self) -> int:
        """Loads under way."""
        return sum(not load.is_over for load in self._loads.values())

    def is_loading(self, request_id: int) -> bool:
        """Return whether a waiting request waits for a load, its own or another's."""
        load = self._loads.get(request_id) or self._behind.get(request_id)
        return load is not None and not load.is_over

    def begin_load(
        self, request_id: int, scope: Scope, token_ids: Sequence[int], num_tokens: int, match: PrefixMatch,
        prefill_tokens_per_s: float | None,
    ) -> bool:  # fmt: skip
        """Load what is stored behind a match of a request's first tokens; return whether it waits for that.

        A request loads once between two admissions. While others load the same, it waits for them, and looks again.
        """
        if request_id in self._looked_up or self.is_stalled or not len(self.stored):
            return False
        num_found, num_full = len(match.blocks), num_tokens // self._size
        if num_full - num_found < MIN_BLOCKS:
            return False
        key, packed = self._keys[scope], as_bytes(token_ids[: num_full * self._size])
        path = self.stored.find(key, packed)
        if len(path) - num_found >= MIN_BLOCKS:
            same = self._readers.get(path[num_found])
            if same is None and self.num_loads >= MAX_LOADS:
                same = next(load for load in self._loads.values() if not load.is_over)
            if same is not None and not same.is_over:
                self._behind[request_id] = same
                return True
        self._behind.pop(request_id, None)
        self._looked_up.add(request_id)
        self.counts.num_queried_tokens += num_tokens - match.num_tokens
        if len(path) - num_found < MIN_BLOCKS or not self._is_faster(prefill_tokens_per_s):
            return False
        try:
            self._cache.lease(request_id, token_ids, scope, match, len(path))
        except OutOfBlocksError:
            return False
        self.stored.hold(path[num_found:])
        self.stored.touch(path)
        load = self._loads[request_id] = _Load(request_id, key, packed, path, num_found, num_found, num_found)
        self._readers.update(dict.fromkeys(path[num_found:], load))
        return True

    def _is_faster(self, prefill_tokens_per_s: float | None) -> bool:
        """Return whether loading is expected to take less time than computing; unknown rates are for loading."""
        if self.blocks_per_s is None or prefill_tokens_per_s is None or self.counts.num_loaded < TRUSTED_BLOCKS:
            return True
        if self.blocks_per_s * self._size >= prefill_tokens_per_s:
            return True
        self.counts.num_slower += 1
        return self.counts.num_slower % RETRY == 0

    def next_read(self) -> tuple[int, list[StoredBlock]] | None:
        """Return the next read, a job and its blocks, to be begun at once; None: none is due."""
        if len(self._jobs) >= MAX_JOBS or not self._loads:
            return None
        load = next((each for each in self._loads.values() if not each.is_over and self._is_due(each)), None)
        if load is None:
            return None
        start, stop = load.num_begun, min(load.num_begun + self._job_blocks, len(load.path))
        load.num_begun = stop
        load.num_jobs += 1
        self._next_job += 1
        self._jobs[self._next_job] = _Job(load, start, stop)
        blocks = [self.stored.record(load.path, index, load.scope, load.packed) for index in range(start, stop)]
        return self._next_job, blocks

    @staticmethod
    def _is_due(load: _Load) -> bool:
        return load.num_begun < len(load.path) and load.num_jobs < 2  # one is copied while the next is read

    def postpone(self, job: int) -> None:
        """Take back the read that `next_read` has returned last: the store cannot begin it now."""
        load, start, _ = self._jobs.pop(job)
        load.num_begun = start
        load.num_jobs -= 1

    def destinations(self, job: int) -> list[int]:
        """Return the blocks of the cache that a read that has ended is to be copied to; none if no one waits for it."""
        load, start, stop = self._jobs[job]
        if load.is_over or load.num_filled != start:
            return []
        return self._cache.leased_blocks(load.request_id, start, stop)

    def end_read(self, job: int, num_whole: int) -> None:
        """Record a read: its first `num_whole` blocks are good, and have been copied to their destinations.

        Reads end in the order in which they were begun.
        """
        load, start, stop = self._jobs.pop(job)
        load.num_jobs -= 1
        if num_whole < stop - start:
            self.counts.num_bad += 1
            self.stored.remove(load.path[start + num_whole])
        if not load.is_over and load.num_filled == start:
            load.num_filled = start + num_whole
            self.counts.num_loaded += num_whole
            self._cache.fill_lease(load.request_id, load.num_filled)
            if num_whole < stop - start or load.num_filled == len(load.path):
                self._end(load)
        else:
            assert load.is_over, f"a read of blocks {start} to {stop} of a load of which {load.num_filled} are filled"
            self._release(load)

    def _end(self, load: _Load) -> None:
        """End a load: what has not been filled is free."""
        load.is_over = True
        self._cache.trim_lease(load.request_id, load.num_filled)
        self._release(load)

    def _release(self, load: _Load) -> None:
        """Release the slots of a load that is over, when no read is under way."""
        if load.is_over and not load.num_jobs:
            slots = load.path[load.first :]
            for slot in slots:
                if self._readers.get(slot) is load:
                    del self._readers[slot]
            self.stored.release(slots)

    def admit(self, request_id: int, scope: Scope, token_ids: Sequence[int], match: PrefixMatch) -> int:
        """End the lease of a request that is admitted with a match, and shares its blocks; return its loaded tokens.

        What it has found without the tier is reused, and worth writing.
        """
        load = self._drop(request_id)
        num_found = len(match.blocks)
        num_loaded = 0 if load is None else max(0, min(num_found, load.num_filled) - load.first)
        self.counts.num_hit_tokens += num_loaded * self._size
        if num_found > num_loaded:
            self.writes.add(scope, token_ids, num_found)
        return min(num_loaded * self._size, match.num_tokens)

    def end(self, request_id: int) -> None:
        """End the lease of a request that has ended, wherever it was."""
        self._drop(request_id)

    def _drop(self, request_id: int) -> _Load | None:
        self._looked_up.discard(request_id)
        self._behind.pop(request_id, None)
        load = self._loads.pop(request_id, None)
        if load is not None:
            if not load.is_over:
                self._end(load)
            self._cache.end_lease(request_id)
        return load

    def give_back(self) -> bool:
        """End all leases, for want of blocks or of answers; return whether there were any.

        What they have filled is cached.
        """
        request_ids = list(self._loads)
        for request_id in request_ids:
            self.cancel(request_id)
        return bool(request_ids)

    def cancel(self, request_id: int) -> None:
        """Give up a load, done or not: the request is admitted with what is there by then."""
        self.counts.num_cancelled += not self._loads[request_id].is_over
        self._drop(request_id)
        self._looked_up.add(request_id)

    # --- checks ---------------------------------------------------------------------------------------------------

    def checking(self) -> Iterator[None]:
        """Assert, in slices, that the stored tree is sound, and that leases, loads and reads agree."""
        yield from self.stored.checking()
        leased = [*self._cache.leases]
        assert leased == [*self._loads], f"leases of {leased}, but loads of {[*self._loads]}"
        for load in self._loads.values():
            assert load.first <= load.num_filled <= load.num_begun <= len(load.path), f"{load}"
        self.writes.check()
        yield


def scope_text(scope: Scope) -> bytes:
    """Return a scope as bytes, different ones for different scopes: each part with a mark and its length."""
    parts = scope if isinstance(scope, tuple) else (scope,)
    texts = [b"-" if part is None else b"+%d:" % len(text := str(part).encode()) + text for part in parts]
    return b"".join(texts)
