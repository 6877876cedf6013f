"""KV store: blocks of keys and values in a folder, written and read by two threads. It decides nothing.

The file `blocks` has slots of one size, and `index` a record of each (`quire.execution.kv_slots`). A record is cleared
before its slot is written and made after that, and a read compares the digest of what it got: so a process that is
killed at any point, and a byte that changes anywhere, cost blocks that are not found, and nothing else. Nothing is
synchronized: what is half written when the power fails does not fit either.

Methods belong to the engine's thread, `close` to any; none waits for the disk but `open` and `close`.
"""

import hmac
import logging
import math
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from quire.core.arrays import UINT8, Array, address, empty
from quire.core.errors import ConfigError
from quire.core.kv_identity import KVIdentity, StateParts, StoredBlock
from quire.execution.kv_folder import KVFolder, delete_older, open_alone, open_folder, open_others, open_read
from quire.execution.kv_slots import SlotTable, record_bytes
from quire.extension import _kernels

log = logging.getLogger(__name__)

PAGE_BYTES = 4096
STAGING_BYTES = 64 << 20  # for blocks on their way out, and as many for those on their way in
SESSION_STAGING_BYTES = 16 << 20  # the same, of a store that is open for as long as it is copied, or only read
EXTENT_BYTES = 64 << 20   # `blocks` grows by so much at a time
PIECE_BYTES = 1 << 20     # digested by the calling thread alone: a step's kernels keep the others
FOLDER_BYTES = 64 << 10   # directories and small files
CLOSE_S = 10.0            # most time for what is staged at the end


class Written(NamedTuple):
    """A write that has ended. Unless `is_whole`, the slot is empty."""

    slot: int
    is_whole: bool
    num_bytes: int
    seconds: float


class LoadedBlocks(NamedTuple):
    """A read that has ended. The first `num_whole` blocks can be taken; the next one's slot is empty now."""

    job: int
    num_whole: int
    num_bytes: int
    seconds: float


Finished = Written | LoadedBlocks


class _Write(NamedTuple):
    """A block to write, from its place in the staging memory; its record without the seal."""

    slot: int
    place: int
    fields: bytes


class _WriteEnd(NamedTuple):
    write: _Write
    seal: bytes | None  # None: it was not written
    seconds: float


class _Read(NamedTuple):
    """Blocks to read into places of the staging memory, and the digests of their bytes; None: not in its slot."""

    job: int
    slots: list[int]
    digests: list[int | None]
    places: list[int]


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """Sizes of a store, how fast it may write, and how many stores share its identity's folders; 0: it is alone."""

    num_slots: int
    block_bytes: int
    bytes_per_s: float = math.inf
    num_stores: int = 1
    staging_bytes: int = STAGING_BYTES

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: a block's, rounded up to a page."""
        return self.block_bytes + -self.block_bytes % PAGE_BYTES

    @property
    def blocks_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.slot_bytes


class KVStore:
    """Slots of a folder that this process has locked; none if the folder could not be used.

    `recovered`: blocks that were found at the start, parents before children, older before newer.
    """

    def __init__(
        self, sizes: SlotSizes, table: SlotTable, folder: KVFolder | None, cache: "CacheBlocks"
    ) -> None:
        self.num_slots, self.recovered = sizes.num_slots, list[StoredBlock]()
        self._table, self._folder = table, folder
        self._cache, self._done = cache, _Finished()
        self._reads: dict[int, _Read] = {}   # jobs that hold places
        self._running = set[int]()           # jobs that the thread has not finished
        self._dropped = set[int]()           # jobs that will not be taken
        self._writer: BlockWriter | None = None     # None: nothing is written, as in the folder of another engine
        if folder is not None:
            self.recovered = table.read(folder.index_file)
            if folder.lock is not None:
                self._writer = BlockWriter(folder, sizes, table, self._done)
            self._reader = BlockReader(folder, sizes, self._done)

    @classmethod
    def open(
        cls, directory: Path, num_bytes: int, cache: "CacheBlocks", block_size: int, identity: KVIdentity,
        bytes_per_s: float = math.inf, num_stores: int = 1,
    ) -> "KVStore":  # fmt: skip
        """Open the first folder of an identity that no other store has, for at most `num_bytes` on the disk.

        block_size: tokens of a block. bytes_per_s: of writes. `num_stores`: of as many engines of this identity, with
        `num_bytes` each. Other folders in the directory that no store has open are deleted, the oldest first, as this
        one grows. Raises ConfigError for too few bytes, and for a directory that others may enter. One that cannot be
        written costs a line in the log.
        """
        none = SlotSizes(0, cache.block_bytes, bytes_per_s, num_stores)
        own_bytes = record_bytes(block_size)
        num_slots = (num_bytes - FOLDER_BYTES) // (none.slot_bytes + own_bytes)
        if num_slots < 1:
            least = FOLDER_BYTES + none.slot_bytes + own_bytes
            raise ConfigError(f"kv_disk_size of {num_bytes} bytes holds no KV block; the least is {least} bytes")
        sizes = replace(none, num_slots=num_slots)
        try:
            folder = open_folder(directory, identity, num_slots * own_bytes, sizes.blocks_bytes)
            return cls._in(folder, sizes, block_size, cache)
        except OSError as error:
            log.warning("the KV store in %s is off: %s", directory, error)
            return cls(none, SlotTable(0, block_size, b""), None, cache)

    @classmethod
    def open_alone(
        cls, folder: Path, num_slots: int, cache: "CacheBlocks", block_size: int, identity: KVIdentity
    ) -> "KVStore":
        """Open the store of one folder to write it, that of a session. OSError if it cannot be used, or is in use."""
        sizes = SlotSizes(num_slots, cache.block_bytes, num_stores=0, staging_bytes=SESSION_STAGING_BYTES)
        opened = open_alone(folder, identity, num_slots * record_bytes(block_size), sizes.blocks_bytes)
        return cls._in(opened, sizes, block_size, cache)

    def others(self, block_size: int) -> "list[KVStore]":
        """Return what the other engines of the identity have stored by now, to be read: they may write over it."""
        if self._folder is None:
            return []
        return [self._read_only(folder, self._cache, block_size) for folder in open_others(self._folder)]

    @classmethod
    def open_read(cls, folder: Path, cache: "CacheBlocks", block_size: int) -> "KVStore":
        """Open a folder that nothing is written to, such as that of a saved session. OSError if it cannot be read."""
        return cls._read_only(open_read(folder), cache, block_size)

    @classmethod
    def _read_only(cls, folder: KVFolder, cache: "CacheBlocks", block_size: int) -> "KVStore":
        num_slots = os.fstat(folder.index_file).st_size // record_bytes(block_size)
        sizes = SlotSizes(num_slots, cache.block_bytes, staging_bytes=SESSION_STAGING_BYTES)
        return cls._in(folder, sizes, block_size, cache)

    @classmethod
    def _in(cls, folder: KVFolder, sizes: SlotSizes, block_size: int, cache: "CacheBlocks") -> "KVStore":
        try:
            return cls(sizes, SlotTable(sizes.num_slots, block_size, folder.key), folder, cache)
        except BaseException:
            folder.close()
            raise

    @property
    def is_on(self) -> bool:
        """Return whether blocks are written; what was written is read also when no more are."""
        return self._writer is not None and self._writer.failure is None

    @property
    def failure(self) -> OSError | None:
        """The error that has ended writing; None: there was none."""
        return None if self._writer is None else self._writer.failure

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk: allocated slots, and their records."""
        return 0 if self._writer is None else self._writer.num_bytes + self.num_slots * self._table.record_bytes

    @property
    def max_read_blocks(self) -> int:
        """Most blocks of all reads that hold memory."""
        return 0 if self._folder is None else len(self._reader.staging.rows)

    def scope_key(self, scope: bytes) -> bytes:
        """Return what stands for a salt and an adapter in this folder, 32 bytes: HMAC-SHA-256 under its key."""
        return hmac.digest(b"" if self._folder is None else self._folder.key, scope, "sha256")

    def begin_write(self, block: StoredBlock, source: int) -> bool:
        """Copy a block of the cache, and write it later; False, and nothing is done: the staging memory is full.

        The slot may have another block, which is gone then. The parent is stored, or its write was begun before.
        """
        if self._writer is None or self._writer.failure is not None or not self._writer.staging.free:
            return False
        place = self._writer.staging.free[-1]
        self._cache.copy_out(source, self._writer.staging.rows[place])
        self._writer.jobs.put(_Write(block.slot, place, self._table.begin(block)))
        self._writer.staging.free.pop()
        return True

    def begin_read(self, job: int, blocks: Sequence[StoredBlock]) -> bool:
        """Read blocks later, into memory that is held until they are taken; False, and nothing is done: there is none.

        job: its number, which no other read has that holds memory. The blocks are a path: each below the one before.
        """
        assert job not in self._reads, f"job {job} twice"
        if self._folder is None or len(self._reader.staging.free) < len(blocks):
            return False
        places = [self._reader.staging.free.pop() for _ in blocks]
        read = _Read(job, [block.slot for block in blocks], list(map(self._table.payload, blocks)), places)
        self._reads[job] = read
        self._running.add(job)
        self._reader.jobs.put(read)
        return True

    def finished(self) -> list[Finished]:
        """Return the writes and reads that have ended since the last call."""
        ended = list[Finished]()
        for item in self._done.take():
            if isinstance(item, LoadedBlocks):
                self._end_read(item)
                ended.append(item)
                continue
            assert self._writer is not None, "a write without a writer"
            (slot, place, fields), seal, seconds = item
            self._writer.staging.free.append(place)
            is_whole = self._table.finish(slot, fields, seal)
            ended.append(Written(slot, is_whole, self._writer.sizes.block_bytes, seconds))
        return ended

    def wait(self, timeout_s: float) -> bool:
        """Wait until `finished` has something to return; False: it took too long."""
        return self._done.wait(timeout_s)

    def take_into(self, job: int, destinations: Sequence[int]) -> None:
        """Copy the first blocks of a read that has ended into blocks of the cache, and release its memory."""
        assert job not in self._running, f"job {job} has not ended"
        for place, destination in zip(self._reads[job].places, destinations, strict=False):
            self._cache.copy_in(self._reader.staging.rows[place], destination)
        self.drop(job)

    def drop(self, job: int) -> None:
        """Release the memory of a read, ended or not: its blocks will not be taken."""
        if job in self._running:
            self._dropped.add(job)
        else:
            self._reader.staging.free += self._reads.pop(job).places

    def forget(self, slots: Sequence[int]) -> None:
        """Empty slots: their blocks will not be recovered."""
        for slot in slots:
            self._table.clear(slot)
        if self._writer is not None and slots:
            self._writer.jobs.put(list(slots))

    def close(self) -> None:
        """Write what is staged, however slow the rate, and unlock the folder. Idempotent."""
        if self._folder is None:
            return
        are_done = self._writer is None or self._writer.close(), self._reader.close()
        if all(are_done):  # else the files are those of a thread that a disk holds up
            self._folder.close()
        self._folder = self._writer = None

    def _end_read(self, ended: LoadedBlocks) -> None:
        read = self._reads[ended.job]
        self._running.remove(ended.job)
        if ended.num_whole < len(read.slots):
            slot, digest = read.slots[ended.num_whole], read.digests[ended.num_whole]
            if digest is not None and self._table.digest(slot) == digest:  # else it has been written again
                self.forget([slot])
        if ended.job in self._dropped:
            self._dropped.remove(ended.job)
            self.drop(ended.job)


class CacheBlocks:
    """Blocks of a KV cache in host memory, copied to and from one run of bytes: the parts of all tensors, in order.

    tensors: without gaps, block i is row i of each. states: uint8 [num_slots, num_bytes] of each layer that has some: a
    state is the run of its rows, cut into `parts` as large as a block.
    """

    def __init__(self, tensors: Sequence[Array], states: Sequence[Array] = ()) -> None:
        self._tensors = tensors  # their memory must stay
        by_bytes, self.block_bytes = defaultdict[int, tuple[list[int], list[int]]](lambda: ([], [])), 0
        for tensor in tensors:
            assert tensor.flags.c_contiguous, "a tensor with gaps"
            num_bytes = tensor.nbytes // len(tensor)
            addresses, offsets = by_bytes[num_bytes]
            addresses.append(address(tensor))
            offsets.append(self.block_bytes)
            self.block_bytes += num_bytes
        self._num_blocks = min(map(len, tensors))  # a draft model's tensors have more
        self._by_bytes = dict(by_bytes)  # addresses and places in the run of tensors that have blocks of so many bytes
        self._block, self._zero = np.zeros(1, np.int64), np.zeros(1, np.int64)
        state_bytes = sum(each.shape[1] for each in states)
        self.parts = StateParts(self._num_blocks, -(-state_bytes // self.block_bytes))
        self._states = states
        self._starts = list(accumulate((each.shape[1] for each in states), initial=0))

    def copy_out(self, block: int, row: Array) -> None:
        """Copy a block, or a part of a state, into memory, uint8 [block_bytes]."""
        if block >= self._num_blocks and self._states:
            num_filled = 0
            for state, own in self._part(block, row):
                own[:] = state
                num_filled += len(own)
            row[num_filled:] = 0
            return
        assert 0 <= block < self._num_blocks, f"block {block} of {self._num_blocks}"
        self._block[0], start = block, address(row)
        for num_bytes, (tensors, offsets) in self._by_bytes.items():
            parts = [start + offset for offset in offsets]
            _kernels.swap_blocks(tensors, parts, num_bytes, address(self._block), address(self._zero), 1)

    def copy_in(self, row: Array, block: int) -> None:
        """Copy memory, uint8 [block_bytes], into a block, or a part of a state."""
        if block >= self._num_blocks and self._states:
            for state, own in self._part(block, row):
                state[:] = own
            return
        assert 0 <= block < self._num_blocks, f"block {block} of {self._num_blocks}"
        self._block[0], start = block, address(row)
        for num_bytes, (tensors, offsets) in self._by_bytes.items():
            parts = [start + offset for offset in offsets]
            _kernels.swap_blocks(parts, tensors, num_bytes, address(self._zero), address(self._block), 1)

    def _part(self, number: int, row: Array) -> Iterator[tuple[Array, Array]]:
        """Yield what a part has of each layer's state, and its place in a row."""
        slot, part = divmod(number - self._num_blocks, self.parts.num_parts)
        first = part * self.block_bytes
        stop = min(first + self.block_bytes, self._starts[-1])
        for state, (start, end) in zip(self._states, pairwise(self._starts), strict=True):
            begin, until = max(first, start), min(stop, end)
            if begin < until:
                yield state[slot, begin - start : until - start], row[begin - first : until - first]


class _Staging:
    """Memory for some blocks. The engine's thread takes places and gives them back."""

    def __init__(self, sizes: SlotSizes) -> None:
        num_places = max(1, min(sizes.staging_bytes // sizes.slot_bytes, sizes.num_slots))
        self.rows = empty((num_places, sizes.block_bytes), UINT8)
        self.rows.reshape(-1)[::PAGE_BYTES] = 0  # a step that is the first to use a page would wait for it
        self.free = list(range(num_places))


class _Finished:
    """Work that threads have finished, for the engine to collect."""

    def __init__(self) -> None:
        self._items: deque[_WriteEnd | LoadedBlocks] = deque()
        self._is_any = threading.Event()

    def add(self, item: _WriteEnd | LoadedBlocks) -> None:
        self._items.append(item)
        self._is_any.set()

    def take(self) -> list[_WriteEnd | LoadedBlocks]:
        if not self._is_any.is_set():
            return []
        self._is_any.clear()  # before the items are taken: one that is added now sets it again
        return [self._items.popleft() for _ in range(len(self._items))]

    def wait(self, timeout_s: float) -> bool:
        return self._is_any.wait(timeout_s)


class BlockWriter:
    """The thread that writes blocks and clears records, in the order in which it gets them, until the first error."""

    def __init__(self, folder: KVFolder, sizes: SlotSizes, table: SlotTable, done: _Finished) -> None:
        self.sizes, self.staging = sizes, _Staging(sizes)
        self.failure: OSError | None = None
        self.num_bytes = os.fstat(folder.blocks_file).st_size  # the size of `blocks`
        self.jobs: SimpleQueue[_Write | list[int] | None] = SimpleQueue()
        self._slots_bytes = sizes.blocks_bytes
        self._folder, self._table, self._done = folder, table, done
        self._is_closing = threading.Event()
        self._next_s = 0.0  # when the rate allows the next write
        self._thread = threading.Thread(target=self._run, name="kv-store-writer", daemon=True)
        self._thread.start()

    def close(self) -> bool:
        """Write what is staged, and end the thread; return whether it has ended."""
        self._is_closing.set()
        self.jobs.put(None)
        self._thread.join(CLOSE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._delete_older(self.num_bytes)
        while (job := self.jobs.get()) is not None:
            started_s, seal = time.perf_counter(), None
            try:
                if self.failure is None:
                    seal = self._do(job)
            except OSError as error:
                self.failure = error
                log.warning("the KV store in %s is off, no more blocks are written: %s", self._folder.path, error)
            if isinstance(job, _Write):
                self._done.add(_WriteEnd(job, seal, time.perf_counter() - started_s))

    def _do(self, job: _Write | list[int]) -> bytes | None:
        if isinstance(job, list):
            for slot in job:
                self._put_record(slot, bytes(self._table.record_bytes))
            return None
        self._wait_for_rate()
        self._allocate(job.slot)
        block, offset = self.staging.rows[job.place], job.slot * self.sizes.slot_bytes
        self._put_record(job.slot, bytes(self._table.record_bytes))
        write_all(self._folder.blocks_file, block.data, offset)
        advise(self._folder.blocks_file, offset, len(block), os.POSIX_FADV_DONTNEED)  # begins to write it out
        seal = self._table.seal(job.fields, digest(block))
        self._put_record(job.slot, seal + job.fields)
        return seal

    def _put_record(self, slot: int, record: bytes) -> None:
        write_all(self._folder.index_file, record, slot * len(record))

    def _allocate(self, slot: int) -> None:
        """Allocate up to a slot: no write within that finds a full disk. Folders that are not in use make room."""
        needed = (slot + 1) * self.sizes.slot_bytes
        if needed <= self.num_bytes:
            return
        stop = min(max(needed, self.num_bytes + EXTENT_BYTES), self._slots_bytes)
        self._delete_older(stop)
        os.posix_fallocate(self._folder.blocks_file, self.num_bytes, stop - self.num_bytes)
        self.num_bytes = stop

    def _delete_older(self, num_bytes: int) -> None:
        """Delete folders of other stores beyond what is left of the bound beside `num_bytes`."""
        if self.sizes.num_stores:
            delete_older(self._folder, self._slots_bytes - num_bytes, self.sizes.num_stores)

    def _wait_for_rate(self) -> None:
        now_s = time.perf_counter()
        if self._next_s > now_s:
            self._is_closing.wait(self._next_s - now_s)
        self._next_s = max(self._next_s, now_s) + self.sizes.block_bytes / self.sizes.bytes_per_s


class BlockReader:
    """The thread that reads blocks and compares digests."""

    def __init__(self, folder: KVFolder, sizes: SlotSizes, done: _Finished) -> None:
        self.staging = _Staging(sizes)
        self.jobs: SimpleQueue[_Read | None] = SimpleQueue()
        self._file, self._sizes, self._done = folder.blocks_file, sizes, done
        self._thread = threading.Thread(target=self._run, name="kv-store-reader", daemon=True)
        self._thread.start()

    def close(self) -> bool:
        """End the thread; return whether it has ended."""
        self.jobs.put(None)
        self._thread.join(CLOSE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            started_s = time.perf_counter()
            num_whole = self._do(job)
            num_bytes = num_whole * self._sizes.block_bytes
            self._done.add(LoadedBlocks(job.job, num_whole, num_bytes, time.perf_counter() - started_s))

    def _do(self, job: _Read) -> int:
        """Return how many blocks were read; the first one that is not whole ends it."""
        for before, slot in pairwise([*job.slots[:1], *job.slots]):
            if slot != before + 1:  # else the system reads ahead, and sooner without being asked
                self._advise(slot, os.POSIX_FADV_WILLNEED)
        for number, (slot, wanted, place) in enumerate(zip(job.slots, job.digests, job.places, strict=True)):
            if wanted is None or not self._is_read(slot, wanted, place):
                return number
        return len(job.slots)

    def _is_read(self, slot: int, wanted: int, place: int) -> bool:
        block = self.staging.rows[place]
        try:
            is_whole = read_all(self._file, block.data, slot * self._sizes.slot_bytes)
        except OSError as error:
            log.warning("a block of the KV store cannot be read: %s", error)
            return False
        self._advise(slot, os.POSIX_FADV_DONTNEED)  # it is in memory now
        return is_whole and digest(block) == wanted

    def _advise(self, slot: int, advice: int) -> None:
        advise(self._file, slot * self._sizes.slot_bytes, self._sizes.block_bytes, advice)


def digest(block: Array) -> int:
    """Return the digest of a block's bytes, uint8 [block_bytes], computed by the calling thread alone."""
    start, stop = address(block), address(block) + len(block)
    pieces = [_kernels.digest(each, min(PIECE_BYTES, stop - each)) for each in range(start, stop, PIECE_BYTES)]
    if len(pieces) == 1:
        return pieces[0]
    whole = np.array(pieces, np.uint64)
    return _kernels.digest(address(whole), whole.nbytes)


def advise(file: int, offset: int, num_bytes: int, advice: int) -> None:
    """Tell the system what will become of bytes of a file; it may know no advice."""
    with suppress(OSError):
        os.posix_fadvise(file, offset, num_bytes, advice)


def write_all(file: int, octets: "bytes | memoryview", offset: int) -> None:
    """Write bytes at a place of a file: a disk may take them in parts. OSError if it takes none."""
    remaining = memoryview(octets)
    while remaining:
        num_written = os.pwrite(file, remaining, offset)
        remaining, offset = remaining[num_written:], offset + num_written


def read_all(file: int, memory: memoryview, offset: int) -> bool:
    """Fill memory from a place of a file; return False if that ends before."""
    while memory:
        num_read = os.preadv(file, [memory], offset)
        if not num_read:
            return False
        memory, offset = memory[num_read:], offset + num_read
    return True
