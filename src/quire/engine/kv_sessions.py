"""KVSessions: the keys and values of saved sessions, each in a small store of its own.

A session is saved by copying the blocks of a pin, between two steps and for a bounded time in each, as the disk tier
copies its own. To restore one, its store becomes a source of loads: the request that computes its tokens again loads
from it as from the tier, so a block that is spoilt is computed. Files are opened and closed in a thread.
"""

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from quire.cache.disk_tier import DiskTier, StoredStates
from quire.cache.manager import KVCacheManager
from quire.cache.pins import PinnedTable
from quire.cache.prefix_tree import as_bytes, scope_text
from quire.cache.stored_blocks import StoredBlocks
from quire.core.errors import ConfigError
from quire.core.kv_identity import NO_PARENT, KVIdentity, StoredBlock
from quire.core.token_ids import TOKEN_BYTES
from quire.engine.kv_disk import KVDisk
from quire.engine.messages import SessionBlocks

if TYPE_CHECKING:
    from quire.execution.kv_store import CacheBlocks, KVStore

OnEnd = Callable[[SessionBlocks], None]


@dataclass(slots=True, eq=False)
class _Save:
    """A pin that is being copied: `num_begun` blocks were, `num_ended` of them are on the disk.

    `sources`: where they are in the cache, and `packed` their tokens (`quire.cache.prefix_tree.as_bytes`); of a model
    with states they end with the parts of one.
    """

    pin_id: int
    pin: PinnedTable
    opening: "Future[KVStore]"
    on_end: OnEnd
    packed: bytes
    sources: list[int]
    num_begun: int = 0
    num_ended: int = 0
    closing: "Future[None] | None" = None

    @property
    def num_blocks(self) -> int:
        return len(self.sources)


class _Opening(NamedTuple):
    """A saved session with a store that is being opened for a request."""

    request_id: int
    opening: "Future[KVStore]"
    on_end: OnEnd


class KVSessions:
    """Saves and restores of one engine. Methods belong to the engine's thread, between two steps."""

    def __init__(
        self, disk: KVDisk, cache: KVCacheManager, blocks: "CacheBlocks", identity: KVIdentity
    ) -> None:
        assert cache.loads is not None, "sessions without loads"
        self._disk, self._cache, self._size = disk, cache, cache.block_size
        self._names = cache.loads.stored_keys.names
        self._blocks, self._identity, self._states = blocks, identity, StoredStates(cache, blocks.parts)
        self._files = ThreadPoolExecutor(1, "kv-sessions")
        self._saves: list[_Save] = []
        self._openings: list[_Opening] = []
        self._restored: dict[int, KVDisk] = {}  # keys: ids of requests
        self._closing: list[KVDisk] = []        # their last reads are under way

    @property
    def num_left(self) -> int:
        """Count what an idle engine goes on with: saves, stores to open, and stores to close."""
        return len(self._saves) + len(self._openings) + len(self._closing)

    def save(self, pin_id: int, folder: Path, on_end: OnEnd) -> None:
        """Copy the full blocks of a pin into a store in a folder, which is made; `on_end` is called once."""
        pin = self._cache.pins.get(pin_id)
        if pin is None:
            return on_end(SessionBlocks(code="gone", message="the session's prefix is pinned no more"))
        packed, sources = self._sources(pin)
        if not sources:
            return on_end(SessionBlocks(identity=self._identity.as_json()))
        opening = self._files.submit(self._open, folder, len(sources))
        self._saves.append(_Save(pin_id, pin, opening, on_end, packed, sources))
        return None

    def open(self, request_id: int, folder: Path, num_blocks: int, identity: str, on_end: OnEnd) -> None:
        """Load from the store of a saved session, for a request, unless it is of another identity: `close_session`."""
        try:
            difference = self._identity.first_difference(KVIdentity(**json.loads(identity)))
        except (ValueError, TypeError) as error:
            return on_end(SessionBlocks(code="unusable", message=f"its identity cannot be read: {error}"))
        if difference is not None:
            return on_end(SessionBlocks(code="incompatible", message=f"this engine has {difference}"))
        if not num_blocks:
            return on_end(SessionBlocks(identity=identity))
        self._openings.append(_Opening(request_id, self._files.submit(self._open, folder), on_end))
        return None

    def close_session(self, request_id: int) -> None:
        """Load no more from the store that was opened for a request."""
        for each in [each for each in self._openings if each.request_id == request_id]:
            self._openings.remove(each)
            each.opening.add_done_callback(_close)
        restored = self._restored.pop(request_id, None)
        if restored is not None:
            self._disk.remove_other(restored)
            self._closing.append(restored)

    def step(self, most_s: float) -> None:
        """Go on with what is under way: blocks are copied for so long, one at least."""
        for opening in [each for each in self._openings if each.opening.done()]:
            self._openings.remove(opening)
            self._add_source(opening)
        for disk in self._closing:
            disk.step()
        for disk in [each for each in self._closing if not each.is_reading]:
            self._closing.remove(disk)
            self._disk.count_reads_of(disk)
            self._files.submit(disk.close_store)
        until_s = time.perf_counter() + most_s
        for save in list(self._saves):
            try:
                ended = self._advance(save, until_s)
            except (OSError, ConfigError) as error:
                ended = SessionBlocks(code="unusable", message=str(error))
            if ended is not None:
                self._end(save, ended)
                break       # what follows is copied after the next step

    def close(self) -> None:
        """Give up all that is under way; what waits for it is answered."""
        for save in list(self._saves):
            self._end(save, SessionBlocks(code="unusable", message="the engine is closed"))
        for each in list(self._openings):
            self.close_session(each.request_id)
            each.on_end(SessionBlocks(code="unusable", message="the engine is closed"))
        for request_id in list(self._restored):
            self.close_session(request_id)
        while self._closing:
            self._closing.pop().close_store()
        self._files.shutdown()

    def _open(self, folder: Path, num_blocks: int | None = None) -> "KVStore":
        """Open the store of a session to be written, with so many blocks, or to be read, in the thread of files."""
        from quire.execution.kv_store import KVStore  # noqa: PLC0415 (needs the extension)

        if num_blocks is None:
            return KVStore.open_read(folder, self._blocks, self._size)
        return KVStore.open_alone(folder, num_blocks, self._blocks, self._size, self._identity)

    def _advance(self, save: _Save, until_s: float) -> SessionBlocks | None:
        """Copy the next blocks of a save; return what has become of it once it is over."""
        if not save.opening.done():
            return None
        store = save.opening.result()
        if save.closing is not None:
            if not save.closing.done():
                return None
            save.closing.result()
            num_blocks = save.num_blocks - self._states.parts.num_parts
            return SessionBlocks(num_blocks, store.num_bytes, self._identity.as_json())
        save.num_ended += len(store.finished())
        if store.failure is not None:
            raise store.failure
        if self._cache.pins.get(save.pin_id) is not save.pin:
            return SessionBlocks(code="gone", message="the session's prefix was unpinned while it was saved")
        if save.num_begun < save.num_blocks and not self._states.are_there(save.sources):
            return SessionBlocks(code="gone", message="the session's state was evicted while it was saved")
        self._copy(save, store, until_s)
        if save.num_ended == save.num_blocks:
            save.closing = self._files.submit(store.close)
        return None

    def _sources(self, pin: PinnedTable) -> tuple[bytes, list[int]]:
        """Return the tokens of what is saved of a pin, and where it is: full blocks, or those up to a state, and it."""
        tokens = as_bytes(pin.token_ids[: len(pin.token_ids) // self._size * self._size])
        packed = self._names(tokens)
        num_blocks = len(packed) // (TOKEN_BYTES * self._size)
        blocks = pin.table.columns[:num_blocks].tolist()
        if not self._states.parts.num_parts:
            return packed, blocks
        return self._states.source(packed, blocks, num_blocks + self._states.parts.num_parts)

    def _copy(self, save: _Save, store: "KVStore", until_s: float) -> None:
        """Copy blocks, one at least, until the time is over or the store has no room for more."""
        scope, num_bytes = store.scope_key(scope_text(save.pin.scope)), len(save.packed) // save.num_blocks
        while save.num_begun < save.num_blocks:
            slot = save.num_begun
            tokens = save.packed[slot * num_bytes : (slot + 1) * num_bytes]
            block = StoredBlock(slot, slot - 1 if slot else NO_PARENT, tokens, scope)
            if not store.begin_write(block, save.sources[slot]):
                return
            save.num_begun += 1
            if time.perf_counter() > until_s:
                return

    def _end(self, save: _Save, ended: SessionBlocks) -> None:
        self._saves.remove(save)
        if save.closing is None:
            save.opening.add_done_callback(_close)
        save.on_end(ended)

    def _add_source(self, opening: _Opening) -> None:
        """Make the store of a session a source of loads."""
        try:
            store = opening.opening.result()
        except (OSError, ConfigError) as error:
            return opening.on_end(SessionBlocks(code="unusable", message=str(error)))
        stored = StoredBlocks(store.num_slots, self._size)
        stored.recover(store.recovered)
        tier = DiskTier(self._cache, stored, store.scope_key, parts=self._states.parts)
        self._restored[opening.request_id] = self._disk.add_other(tier, store)
        return opening.on_end(SessionBlocks(len(stored), store.num_bytes, self._identity.as_json()))


def _close(opened: "Future[KVStore]") -> None:
    """Close a store that is not used after all."""
    if opened.exception() is None:
        opened.result().close()
