"""Stores of small KV blocks, their content by path, and processes that are killed at a chosen call of the system.

As a program: lines of JSON [directory, number, moment] on standard input; each is a process that runs `work` in that
directory and kills itself at its call number `number`: before it, after half of a write, or after it. The answer is
a line with its exit status, and the name of the call: 0 if there are fewer calls.
"""

import hashlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from quire.core.kv_identity import NO_PARENT, KVIdentity, StoredBlock
from quire.execution import kv_folder, kv_slots, kv_store
from quire.execution.kv_store import FOLDER_BYTES, CacheBlocks, KVStore, LoadedBlocks, Written

BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS = 16, 12, 6
SHAPES = ((NUM_BLOCKS, 2, 24), (NUM_BLOCKS, 7), (NUM_BLOCKS, 2, 24))  # tensors, block by block
BLOCK_BYTES = 2 * (2 * 24 + 7 + 2 * 24)
IDENTITY = KVIdentity("spec", "weights", "bfloat16", "", "bfloat16", BLOCK_SIZE, "layout", "cpp avx2", "rotary", "", "")
MOMENTS = ("before", "half", "after")
SCOPES = (b"", b"a salt")

Path_ = tuple[bytes, ...]  # the scope's text, then the tokens of each block from the first on


def cache() -> list[np.ndarray[Any, Any]]:
    """Return the tensors of a small cache."""
    return [np.zeros(shape, np.uint16) for shape in SHAPES]


def size_of(num_slots: int) -> int:
    """Return the bytes for a store of so many slots."""
    return FOLDER_BYTES + num_slots * (4096 + kv_slots.record_bytes(BLOCK_SIZE))


def open_store(
    directory: Path, num_slots: int = NUM_SLOTS, identity: KVIdentity = IDENTITY, bytes_per_s: float = math.inf,
    num_stores: int = 1,
) -> "Store":  # fmt: skip
    """Open a store with a cache of its own."""
    tensors, num_bytes = cache(), size_of(num_slots)
    blocks = CacheBlocks(tensors)
    return Store(KVStore.open(directory, num_bytes, blocks, BLOCK_SIZE, identity, bytes_per_s, num_stores), tensors)


def tokens(*ids: int) -> bytes:
    """Return a block of tokens that are all alike, or the ids in turns."""
    return np.resize(np.array(ids, np.int32), BLOCK_SIZE).tobytes()


def content(path: Path_) -> bytes:
    """Return the keys and values of a block: another run of bytes for each path."""
    stream, digest = b"", hashlib.sha256(repr(path).encode()).digest()
    while len(stream) < BLOCK_BYTES:
        stream += digest
        digest = hashlib.sha256(digest).digest()
    return stream[:BLOCK_BYTES]


class Store:
    """A store beside its cache, and the paths of what was put into its slots."""

    def __init__(self, store: KVStore, tensors: list[np.ndarray[Any, Any]]) -> None:
        self.store, self.tensors = store, tensors
        self.blocks: dict[int, StoredBlock] = {}   # slot: what is written there
        self.paths: dict[int, Path_] = {}
        texts = {store.scope_key(text): text for text in SCOPES}
        for block in store.recovered:
            above = (texts[block.scope],) if block.parent == NO_PARENT else self.paths[block.parent]
            self.blocks[block.slot], self.paths[block.slot] = block, (*above, block.tokens)

    def fill(self, place: int, run: bytes) -> None:
        """Put bytes into a block of the cache."""
        values = np.frombuffer(run, np.uint16)
        for tensor in self.tensors:
            count = tensor[place].size
            tensor[place], values = values[:count].reshape(tensor[place].shape), values[count:]

    def found(self, place: int) -> bytes:
        """Return the bytes of a block of the cache."""
        return b"".join(tensor[place].tobytes() for tensor in self.tensors)

    def begin(self, slot: int, parent: int, ids: bytes, scope: bytes = SCOPES[0], place: int = 0) -> bool:
        """Begin to write the content of a path, from a block of the cache."""
        above = (scope,) if parent == NO_PARENT else self.paths[parent]
        self.blocks[slot] = StoredBlock(slot, parent, ids, self.store.scope_key(above[0]))
        self.paths[slot] = *above, ids
        self.fill(place, content(self.paths[slot]))
        return self.store.begin_write(self.blocks[slot], place)

    def next(self) -> list[Written | LoadedBlocks]:
        """Return what has ended next."""
        while not (ended := self.store.finished()):
            assert self.store.wait(60), "neither a write nor a read has ended"
        return ended

    def put(self, slot: int, parent: int, ids: bytes, scope: bytes = SCOPES[0]) -> bool:
        """Write a block, and return whether it is whole."""
        assert self.begin(slot, parent, ids, scope)
        (ended,) = self.next()
        assert isinstance(ended, Written)
        assert ended.slot == slot
        return ended.is_whole

    def read(self, slots: Sequence[int], job: int = 0) -> int:
        """Read a path of slots; return how many were whole, after a look at their bytes."""
        assert self.store.begin_read(job, [self.blocks[slot] for slot in slots])
        (ended,) = self.next()
        assert isinstance(ended, LoadedBlocks)
        assert ended.job == job
        places = list(range(1, ended.num_whole + 1))
        self.store.take_into(job, places)
        for slot, place in zip(slots, places, strict=False):
            assert self.found(place) == content(self.paths[slot]), f"slot {slot} has other bytes"
        return ended.num_whole

    def path_to(self, slot: int) -> list[int]:
        """Return the slots from the first block of a scope to this one."""
        parent = self.blocks[slot].parent
        return [slot] if parent == NO_PARENT else [*self.path_to(parent), slot]

    def check(self) -> int:
        """Read the path to each block that was recovered; return how many blocks were whole."""
        return sum(self.read(path) == len(path) for path in map(self.path_to, list(self.blocks)))


def work(directory: Path) -> None:
    """Open a store, write two paths, empty a slot, write over another, and close it; then do it again."""
    for round_number in (1, 2):
        mine = open_store(directory)
        mine.put(0, NO_PARENT, tokens(1, round_number))
        mine.put(1, 0, tokens(2))
        mine.put(2, 1, tokens(3))
        mine.put(3, NO_PARENT, tokens(1, round_number), SCOPES[1])
        mine.store.forget([2])
        mine.put(4, 3, tokens(4))
        mine.put(4, 0, tokens(5, round_number))
        mine.begin(2, 4, tokens(6))
        mine.begin(5, 2, tokens(7), place=1)
        mine.store.close()


class FatalSystem:
    """The module `os`, with one call at which the process is killed."""

    CALLS = ("open", "pwrite", "ftruncate", "posix_fallocate", "utime", "unlink", "rmdir", "close")

    def __init__(self, number: int, moment: str, report: Callable[[str], None]) -> None:
        self._remaining, self._moment, self._report = number, moment, report

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (any function)
        call = getattr(os, name)
        return self._counted(name, call) if name in self.CALLS else call

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:  # noqa: ANN401
            self._remaining -= 1
            if self._remaining:
                return call(*arguments)
            self._report(name)
            if self._moment == "half" and name == "pwrite":
                file, octets, offset = arguments
                call(file, memoryview(octets)[: len(octets) // 2], offset)
            elif self._moment != "before":
                call(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("alive")

        return counted


def _child(directory: Path, number: int, moment: str, report: int) -> NoReturn:
    fatal: Any = FatalSystem(number, moment, lambda name: os.write(report, name.encode()) and None)
    kv_folder.os = kv_slots.os = kv_store.os = fatal
    try:
        work(directory)
    except BaseException as error:
        os.write(report, f"{error!r}".encode())
        os._exit(1)
    os._exit(0)


def main() -> None:
    """Serve the lines."""
    for line in sys.stdin:
        directory, number, moment = json.loads(line)
        found, report = os.pipe()
        pid = os.fork()
        if pid == 0:
            _child(Path(directory), number, moment, report)
        os.close(report)
        status = os.waitpid(pid, 0)[1]
        name = os.read(found, 1000).decode()
        os.close(found)
        print(json.dumps([os.waitstatus_to_exitcode(status), name]), flush=True)


if __name__ == "__main__":
    main()
