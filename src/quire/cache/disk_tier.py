"""DiskTier: the decisions of a disk tier: blocks to write, and what loads find in it. No clock, no I/O.

Blocks are written when they are likely to be asked for again: those of a prefix that a request has found in the cache,
and those of a finished request, which its next turn begins with. Such a run of tokens is queued; its blocks are looked
up again when they are copied, so a queued run keeps no block and slows down no eviction.

A load of stored blocks (`quire.cache.loads`) keeps their slots. Requests with one prefix load it once.

Of a model with states a run is written as far as its last block with a snapshot, and behind that the snapshot, in parts
that are as large as a block and lie in slots as blocks do (docs/decisions/0043). A load ends at such a block.
"""

from array import array
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from quire.cache.loads import KVLoad, Wanted
from quire.cache.prefix_tree import PrefixMatch, Scope, as_bytes, scope_text
from quire.cache.stored_blocks import StoredBlocks
from quire.core.config import DiskWritePolicy
from quire.core.kv_identity import NO_STATES, StateParts, StoredBlock
from quire.core.token_ids import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire.cache.manager import KVCacheManager

MAX_QUEUED_BYTES = 16 << 20  # tokens of queued runs, 4 bytes each: 4 million
RETRY = 16               # one of so many loads that seem slower than computing is made, to measure again
TRUSTED_BLOCKS = 64      # loaded, before their rate counts
MAX_KEYS = 4096          # scopes with keys in memory


@dataclass(slots=True, eq=False)
class StoredLoad(KVLoad):
    """A load of blocks in the slots of `path`."""

    source: "DiskTier"
    scope: bytes
    packed: bytes
    path: Sequence[int]

    def same(self) -> KVLoad | None:
        """Return a load under way that reads the first block of this one."""
        return self.source.readers.get(self.path[self.first])

    def begin(self) -> None:
        """Keep the slots."""
        slots, tier = self.path[self.first :], self.source
        tier.stored.hold(slots)
        tier.stored.touch(self.path)
        tier.readers.update(dict.fromkeys(slots, self))

    def records(self, start: int, stop: int) -> list[StoredBlock]:
        """Return the records of blocks [start, stop)."""
        stored = self.source.stored
        return [stored.record(self.path, index, self.scope, self.packed) for index in range(start, stop)]

    def record_read(self, start: int, stop: int, num_whole: int, *, is_used: bool) -> None:
        """Record a read; a block that is not what was written is removed, with all below it."""
        counts = self.source.counts
        counts.num_loaded += num_whole if is_used else 0
        if num_whole < stop - start:
            counts.num_bad += not self.source.is_written_over
            self.source.stored.remove(self.path[start + num_whole])

    def release(self) -> None:
        """Release the slots."""
        slots, readers = self.path[self.first :], self.source.readers
        for slot in slots:
            if readers.get(slot) is self:
                del readers[slot]
        self.source.stored.release(slots)


class _QueuedRun(NamedTuple):
    """Tokens of a scope, with blocks that are to be written if they are still in the cache; `packed`: their names."""

    scope: Scope
    key: bytes
    tokens: bytes
    packed: bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the tokens, and of the names where they are others."""
        return len(self.tokens) + (len(self.packed) if self.packed is not self.tokens else 0)


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


class StoredStates:
    """Places of the states of a cache among stored blocks."""

    def __init__(self, cache: "KVCacheManager", parts: StateParts) -> None:
        self._tree, self.parts = cache.prefixes.snapshots, parts
        self._tokens, self._num_bytes = parts.tokens(cache.block_size), cache.block_size * TOKEN_BYTES

    def source(self, packed: bytes, blocks: Sequence[int], num_slots: int) -> tuple[bytes, list[int]]:
        """Return a run of cached blocks up to the last with a snapshot, with its parts, and where they all are.

        Nothing if no block has one, or if `num_slots` do not hold them.
        """
        assert self._tree is not None, "states without a prefix tree"
        column = self._tree.last_column(blocks)
        if column is None or column + 1 + self.parts.num_parts > num_slots:
            return b"", []
        found = [*blocks[: column + 1], *self.parts.numbers(self._tree.snapshots[blocks[column]])]
        return packed[: (column + 1) * self._num_bytes] + self._tokens, found

    def are_there(self, sources: Sequence[int]) -> bool:
        """Return whether the state is there that `source` has found behind blocks."""
        if not self.parts.num_parts:
            return True
        assert self._tree is not None, "states without a prefix tree"
        first = len(sources) - self.parts.num_parts
        slot = self._tree.snapshots.get(sources[first - 1])
        return slot is not None and self.parts.numbers(slot, 0, 1) == [sources[first]]

    def stored(
        self, stored: StoredBlocks, packed: bytes, path: list[int], num_found: int, most: int
    ) -> tuple[bytes, list[int]]:
        """Return a stored run up to its last block with a state, `most` at most, with the parts, and all slots.

        Nothing if there is none behind the first `num_found` blocks.
        """
        for count in range(min(len(path), most), num_found, -1):
            if parts := stored.below(path[count - 1], self._tokens):
                return packed[: count * self._num_bytes] + self._tokens, [*path[:count], *parts]
        return b"", []


class WriteQueue:
    """Runs of blocks that are to be written, in bounded memory. `names`: `StoredKeys.names`."""

    def __init__(
        self, cache: "KVCacheManager", stored: StoredBlocks, keys: _ScopeKeys, names: "Callable[[bytes], bytes]",
        counts: TierCounts, policy: DiskWritePolicy, parts: StateParts,
    ) -> None:  # fmt: skip
        self._cache, self._stored, self._keys, self._counts = cache, stored, keys, counts
        self._policy, self._size, self._states = policy, cache.block_size, StoredStates(cache, parts)
        self._names, self._runs, self._num_bytes = names, deque[_QueuedRun](), 0

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
        tokens = as_bytes(token_ids[: num_blocks * self._size])
        run = _QueuedRun(scope, self._keys[scope], tokens, self._names(tokens))
        self._runs.append(run)
        self._num_bytes += run.num_bytes
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
            num_blocks = len(run.packed) // (TOKEN_BYTES * self._size)
            packed, blocks = run.packed, list[int]()
            if self._states.parts.num_parts:
                packed, blocks = self._states.source(packed, self._cached(run), stored.num_slots)
            path = stored.path(run.key, packed)
            stored.touch(path)
            if len(path) * self._size * TOKEN_BYTES < len(packed):
                blocks = blocks or self._cached(run)
                try:
                    while len(path) < len(blocks) and stored.add(path, run.key, packed) is not None:
                        yield stored.record(path, len(path) - 1, run.key, packed), blocks[len(path) - 1]
                finally:
                    stored.touch(path)
            self._pop(min(len(path), num_blocks))

    def _cached(self, run: _QueuedRun) -> list[int]:
        return self._cache.prefixes.blocks_of(array("i", run.tokens[: len(run.packed)]), run.scope)

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
        run = self._runs.popleft()
        self._num_bytes -= run.num_bytes
        self._counts.num_dropped += len(run.packed) // (TOKEN_BYTES * self._size) - num_stored

    def check(self) -> None:
        """Assert that the bytes of all runs are counted."""
        assert self._num_bytes == sum(run.num_bytes for run in self._runs)


class DiskTier:
    """Decides what is written to a store, and is a source of loads.

    `scope_key`: of the store, 32 bytes of a scope's text.
    """

    def __init__(
        self, cache: "KVCacheManager", stored: StoredBlocks, scope_key: "Callable[[bytes], bytes]",
        policy: DiskWritePolicy = "finished", parts: StateParts = NO_STATES,
    ) -> None:  # fmt: skip
        assert cache.loads is not None, "a tier without loads"
        self.stored, self._size, self._names = stored, cache.block_size, cache.loads.stored_keys.names
        self._keys = _ScopeKeys(scope_key)
        self.readers: dict[int, KVLoad] = {}       # the load of each slot that is read for one
        self.counts = TierCounts()
        self.writes = WriteQueue(cache, stored, self._keys, self._names, self.counts, policy, parts)
        self._states = StoredStates(cache, parts)
        self.blocks_per_s: float | None = None     # speed of loads, measured by the caller
        self.is_written_over = False               # another engine writes: a changed block is not spoilt
        self.is_stalled = False                    # set by the caller: reads do not return, so none is begun

    @property
    def is_ready(self) -> bool:
        """Return whether it may have anything, and answers."""
        return not self.is_stalled and len(self.stored) > 0

    def find(self, wanted: Wanted, num_found: int) -> StoredLoad | None:
        """Return a load of what is stored behind the first `num_found` blocks; None: nothing."""
        num_full = wanted.num_tokens // self._size
        key, packed = self._keys[wanted.scope], self._names(as_bytes(wanted.token_ids[: num_full * self._size]))
        path, parts = self.stored.find(key, packed), self._states.parts
        if parts.num_parts:
            most = (wanted.num_tokens - 1) // self._size    # the last token is computed behind the state
            packed, path = self._states.stored(self.stored, packed, path, num_found, most)
        if len(path) <= num_found:
            return None
        return StoredLoad(self, wanted.request_id, num_found, len(path), num_found, num_found,
                          scope=key, packed=packed, path=path, state=parts)  # fmt: skip

    def is_worth(self, wanted: Wanted, match: PrefixMatch, load: KVLoad | None) -> bool:
        """Count a request that looks for tokens here once; return whether loading is expected to be faster.

        Unknown rates are for loading.
        """
        self.counts.num_queried_tokens += wanted.num_tokens - match.num_tokens
        if load is None:
            return False
        if self.blocks_per_s is None or wanted.tokens_per_s is None or self.counts.num_loaded < TRUSTED_BLOCKS:
            return True
        num_tokens, num_read = (load.num_cached - load.first) * self._size, load.num_blocks - load.first
        if self.blocks_per_s * num_tokens >= wanted.tokens_per_s * num_read:
            return True
        self.counts.num_slower += 1
        return self.counts.num_slower % RETRY == 0

    def record_hit(self, num_tokens: int) -> None:
        """Count tokens that were loaded, of a request that is admitted with them."""
        self.counts.num_hit_tokens += num_tokens

    def record_cancelled(self) -> None:
        """Count a load that was given up."""
        self.counts.num_cancelled += 1

    def checking(self) -> Iterator[None]:
        """Assert, in slices, that the stored tree and the queue are sound."""
        yield from self.stored.checking()
        self.writes.check()
        yield
