"""Rates of the KV store on a disk, of the digest of weights, and of three ways to keep its index (docs/decisions/0036).

    python bench/kv_store.py disk --directory FOLDER
    python bench/kv_store.py index --directory FOLDER
    python bench/kv_store.py weights --model FOLDER
"""

import argparse
import hashlib
import os
import shutil
import sqlite3
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from quire.core.kv_identity import KVIdentity, StoredBlock
from quire.engine.formats import read_source
from quire.execution.kv_slots import SlotTable, record_bytes
from quire.execution.kv_store import CacheBlocks, KVStore
from quire.kernels.choice import choose_back_end
from quire.model.loader import load_model
from quire.model.packed_weights import weights_digest

BLOCK_SIZE = 16
IDENTITY = KVIdentity("", "", "bfloat16", "", "bfloat16", BLOCK_SIZE, "", "", "", "", "")
SCOPE = bytes(32)


def timed(function: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    function()
    return time.perf_counter() - started_s


def path_of(num_blocks: int, scope: bytes = SCOPE) -> list[StoredBlock]:
    ids = np.arange(num_blocks, dtype=np.int32)
    return [StoredBlock(slot, slot - 1, np.full(BLOCK_SIZE, slot, np.int32).tobytes(), scope) for slot in ids.tolist()]


def drop_page_cache(folder: Path) -> None:
    """Write out and drop the pages of all files in a folder."""
    for each in folder.rglob("*"):
        if each.is_file():
            with each.open("r+b") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk(folder: Path, rounds: int) -> None:
    """Print rates for a conversation of 8,192 tokens of a model with 12,288 bytes of KV per token."""
    num_blocks, rows = 512, list[list[float]]()
    arrays = [np.random.RandomState(seed).randint(0, 1 << 16, (2, 2048), np.uint16) for seed in range(48)]
    for _ in range(rounds):
        place = folder / "kv"
        store = KVStore.open(place, 256 << 20, CacheBlocks(arrays), BLOCK_SIZE, IDENTITY)
        blocks, longest_s, num_written = path_of(num_blocks, store.scope_key(b"")), 0.0, 0
        started_s = time.perf_counter()
        for block in blocks:
            begun_s = time.perf_counter()
            while not store.begin_write(block, 0):
                store.wait(1)
                num_written += len(store.finished())
                begun_s = time.perf_counter()
            longest_s = max(longest_s, time.perf_counter() - begun_s)
        while num_written < num_blocks:
            store.wait(1)
            num_written += len(store.finished())
        write_s = time.perf_counter() - started_s
        store.close()
        cold, warm, open_s = [], [], 0.0
        for found in (cold, warm):
            if found is cold:
                drop_page_cache(place)
            started_s = time.perf_counter()
            store = KVStore.open(place, 256 << 20, CacheBlocks(arrays), BLOCK_SIZE, IDENTITY)
            open_s = time.perf_counter() - started_s
            found.append(timed(lambda store=store: read(store)))
            store.close()
        rows.append([write_s, longest_s, open_s, cold[0], warm[0]])
        shutil.rmtree(place)
    num_bytes = num_blocks * 48 * 4096
    write_s, longest_s, open_s, cold_s, warm_s = (statistics.median(column) for column in zip(*rows, strict=True))
    written, cold_read, warm_read = (num_bytes / each / 1e6 for each in (write_s, cold_s, warm_s))
    print(
        f"{num_bytes / 1e6:.0f} MB, medians of {rounds}: written {written:.0f} MB/s, a block is copied in at most "
        f"{longest_s * 1e3:.2f} ms; opened in {open_s * 1e3:.0f} ms; read and copied into the cache at {cold_read:.0f} "
        f"MB/s after the page cache was dropped, at {warm_read:.0f} MB/s at once again"
    )
    for number, name in enumerate(("write s", "longest copy s", "open s", "cold read s", "read again s")):
        print(f"  {name:15} " + " ".join(f"{row[number]:.4f}" for row in sorted(rows)))


def read(store: KVStore) -> None:
    size, num_blocks = store.max_read_blocks // 4, len(store.recovered)
    jobs = [store.recovered[start : start + size] for start in range(0, num_blocks, size)]
    begun, ended = 0, 0
    while ended < len(jobs):
        while begun < len(jobs) and store.begin_read(begun, jobs[begun]):
            begun += 1
        store.wait(1)
        for each in store.finished():
            assert each.num_whole == len(jobs[each.job])
            store.take_into(each.job, [1] * each.num_whole)
            ended += 1


class Table:
    """The table of records in place."""

    def __init__(self, folder: Path, num_slots: int) -> None:
        self._file = os.open(folder / "index", os.O_RDWR | os.O_CREAT)
        self.table = SlotTable(num_slots, BLOCK_SIZE, b"key")

    def put(self, block: StoredBlock) -> None:
        fields = self.table.begin(block)
        os.pwrite(self._file, self.table.seal(fields, block.slot) + fields, block.slot * self.table.record_bytes)

    def recover(self) -> list[StoredBlock]:
        return self.table.read(self._file)


class Journal:
    """Records at the end of a file, the last one of a slot counts; the file is written anew when it is read."""

    FIELDS = struct.Struct("<Qqq32s64s8s")

    def __init__(self, folder: Path, num_slots: int) -> None:
        self._path = folder / "journal"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def put(self, block: StoredBlock) -> None:
        fields = struct.pack("<Qqq32s64s", 0, block.slot, block.parent, block.scope, block.tokens)
        os.write(self._file, fields + hashlib.blake2b(fields, digest_size=8, key=b"key").digest())

    def recover(self) -> list[StoredBlock]:
        whole, found = self._path.read_bytes(), dict[int, StoredBlock]()
        for _, slot, parent, scope, tokens, check in self.FIELDS.iter_unpack(whole):
            fields = struct.pack("<Qqq32s64s", 0, slot, parent, scope, tokens)
            if check == hashlib.blake2b(fields, digest_size=8, key=b"key").digest():
                found.pop(slot, None)
                found[slot] = StoredBlock(slot, parent, tokens, scope)
        folder = self._path.parent / "new"
        folder.mkdir()
        compact = Journal(folder, len(found))
        for block in found.values():
            compact.put(block)
        (folder / "journal").replace(self._path)
        folder.rmdir()
        return list(found.values())


class SQLite:
    """A table of SQLite with the write-ahead log, and without synchronizing: what a killed process leaves is whole."""

    def __init__(self, folder: Path, num_slots: int) -> None:
        self.path = folder / "index.sqlite"
        self.connection = sqlite3.connect(self.path, isolation_level=None)
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=OFF")
        self.connection.execute(
            "CREATE TABLE IF NOT EXISTS slots (slot INTEGER PRIMARY KEY, written INTEGER, stamp BLOB, "
            "parent_stamp BLOB, parent INTEGER, scope BLOB, tokens BLOB, payload BLOB)"
        )

    def put(self, block: StoredBlock) -> None:
        slot, parent, tokens, scope = block
        values = slot, time.monotonic_ns(), bytes(8), bytes(8), parent, scope, tokens, bytes(8)
        self.connection.execute("INSERT OR REPLACE INTO slots VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)

    def recover(self) -> list[StoredBlock]:
        rows = self.connection.execute("SELECT slot, parent, tokens, scope FROM slots ORDER BY written")
        return [StoredBlock(*row) for row in rows]


def index(folder: Path, num_slots: int, turns: int) -> None:
    """Print what records of `num_slots` slots cost, each written `turns` times, and what spoilt bytes do."""
    blocks = path_of(num_slots)
    print(f"{num_slots:,} slots, each written {turns} times; a record has {record_bytes(BLOCK_SIZE)} bytes")
    for kind in (Table, Journal, SQLite):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            own = kind(Path(name), num_slots)
            write_s = timed(lambda own=own: [own.put(block) for _ in range(turns) for block in blocks])
            num_bytes = sum(each.stat().st_size for each in Path(name).iterdir())
            found = list[StoredBlock]()
            again = kind(Path(name), num_slots)
            recover_s = timed(lambda again=again, found=found: found.extend(again.recover()))
            assert found == blocks
            print(
                f"  {kind.__name__:8} {write_s / turns / num_slots * 1e6:6.1f} us a record, {num_bytes / 1e6:6.1f} MB, "
                f"found again in {recover_s * 1e3:6.0f} ms"
            )
    spoilt(folder)


def spoilt(folder: Path, num_slots: int = 2000, num_tries: int = 1000) -> None:
    """Print what one changed bit does to a database and to the table."""
    blocks, rng = path_of(num_slots), np.random.RandomState(0)
    for kind in (Table, SQLite):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            own = kind(Path(name), num_slots)
            for block in blocks:
                own.put(block)
            if isinstance(own, SQLite):
                own.connection.close()
            (file,) = Path(name).iterdir()
            whole, wrong, errors, lost = file.read_bytes(), 0, 0, list[int]()
            for _ in range(num_tries):
                changed = bytearray(whole)
                changed[rng.randint(len(whole))] ^= 1 << rng.randint(8)
                file.write_bytes(changed)
                try:
                    found = kind(Path(name), num_slots).recover()
                except sqlite3.DatabaseError:
                    errors += 1
                    continue
                wrong += bool(set(found) - set(blocks))
                lost.append(len(blocks) - len(set(found) & set(blocks)))
            print(
                f"  {kind.__name__:8} one bit changed, {num_tries} times: errors of the whole index {errors}, wrong "
                f"records {wrong}, records lost at most {max(lost)}"
            )


def weights(model: Path, load_format: str, rounds: int) -> None:
    """Print the seconds per GB of the digest of a model's weights."""
    decoder = load_model(read_source(model, load_format), back_end=choose_back_end("cpu"))
    seconds = sorted(timed(lambda: weights_digest(decoder)) for _ in range(rounds))
    gigabytes = decoder.weight_bytes / 1e9
    median, least, most = (each / gigabytes for each in (statistics.median(seconds), seconds[0], seconds[-1]))
    print(
        f"{gigabytes:.2f} GB in {len(decoder.kept_weights)} arrays: median {median:.3f} s/GB, {least:.3f} to {most:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("disk", "index", "weights"))
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--slots", type=int, default=20_000)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.what == "weights":
        weights(arguments.model, arguments.load_format, arguments.rounds)
    elif arguments.what == "index":
        index(arguments.directory, arguments.slots, arguments.turns)
    else:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
            disk(Path(name), arguments.rounds)


if __name__ == "__main__":
    main()
