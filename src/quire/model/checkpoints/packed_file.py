"""Packed file: the arrays of a loaded model as they are in memory, so that a start reads them and converts nothing.

    magic and version, 8 bytes; the length of the header and its digest, 8 bytes each, little-endian; the header, JSON
    zeros up to a multiple of 4,096; the arrays in the header's order, each at a multiple of 64

The header names what the arrays were made of (`identity`), and by name the records: plain values, and for each array
its dtype, shape and digest. An array's place follows from those before it, so places cannot overlap. A file is read
into memory of its own as a whole, and each digest is that of what is in this memory: a file that differs from what was
written is not computed with, and a later change of it has no effect. Mapped, a file that another process cuts would end
this one by SIGBUS. Digests find damage, not forgery.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quire.core.arrays import MODEL_DTYPES, UINT8, Array, DType, address, dtype_name, empty
from quire.core.errors import ModelError
from quire.extension import _kernels

SUFFIX = ".quire"
MAGIC = b"QUIREPW1"  # the last character is the version of this format
LENGTH_BYTES = 8
HEADER_AT = len(MAGIC) + 2 * LENGTH_BYTES
MAX_HEADER_BYTES = 256 << 20  # 4,096 experts in each of 60 layers
PAGE_BYTES, ALIGNMENT = 4096, 64
MAX_DIMENSIONS = 3
DTYPES: Mapping[str, DType] = {**MODEL_DTYPES, "uint8": UINT8, "int32": np.dtype(np.int32)}

Fields = dict[str, Any]  # plain values, as in JSON


class PackedFileError(ModelError):
    """A packed file that is not used: of something else, or damaged. The text names the file and the difference."""


class Record(NamedTuple):
    """Entry of the file, of one layer or of one tensor."""

    fields: Fields
    arrays: dict[str, Array]


@dataclass(frozen=True, slots=True)
class PackedRecords:
    """Records by name: of a file, or being made."""

    place: str                 # for errors
    is_complete: bool = False  # read from a file
    records: dict[str, Record] = field(default_factory=dict)

    def find(self, name: str) -> Record | None:
        """Return a record, or None while they are being made. PackedFileError if a file does not have it."""
        if not self.is_complete:
            return None
        if name not in self.records:
            raise self.error(name, "is missing")
        return self.records[name]

    def add(self, name: str, record: Record) -> None:
        """Add a record with a name of its own."""
        assert name not in self.records, f"two records {name}"
        self.records[name] = record

    def error(self, name: str, problem: str) -> PackedFileError:
        """Return the error that names the file and a record."""
        return PackedFileError(f"{self.place}: {name} {problem}")


def read_packed(path: Path, identity: Fields) -> PackedRecords:
    """Read and check a file. PackedFileError if it is of another identity or damaged, OSError if there is none."""
    with path.open("rb") as file:
        header, data_at = _read_header(file.fileno(), path)
        found = header.get("identity")
        if found != identity:
            raise PackedFileError(f"{path}: made with {_difference(found, identity)}")
        try:
            records = _read_arrays(file.fileno(), data_at, header["records"])
        except (AttributeError, KeyError, TypeError) as error:
            raise PackedFileError(f"{path}: the header is damaged: {error!r:.100}") from error
        except (ValueError, OverflowError, MemoryError, RuntimeError, OSError) as error:
            raise PackedFileError(f"{path}: {error!s:.200}") from error
    return PackedRecords(str(path), is_complete=True, records=records)


def _read_header(file: int, path: Path) -> tuple[Fields, int]:
    """Return the header, and the byte where the arrays begin."""
    start = os.pread(file, HEADER_AT, 0)
    if start[: len(MAGIC)] != MAGIC or len(start) < HEADER_AT:
        raise PackedFileError(f"{path}: not a packed file of this version")
    length = int.from_bytes(start[len(MAGIC) : -LENGTH_BYTES], "little")
    text = os.pread(file, min(length, MAX_HEADER_BYTES, os.fstat(file).st_size), HEADER_AT)
    if not text or len(text) != length or digest_text(np.frombuffer(text, UINT8)) != start[-LENGTH_BYTES:].hex():
        raise PackedFileError(f"{path}: the header is damaged")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PackedFileError(f"{path}: the header is damaged: {error}") from error
    if not isinstance(header, dict):
        raise PackedFileError(f"{path}: the header is damaged: no object")
    return header, _rounded_up(HEADER_AT + length, PAGE_BYTES)


class _Array(NamedTuple):
    """An array of a file: its place in the memory of all of them."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    start: int
    stop: int
    digest: str


def _read_arrays(file: int, data_at: int, records: Mapping[str, Any]) -> dict[str, Record]:
    """Return the records with their arrays, all in one piece of memory. ValueError for what differs from its digest."""
    entries = list(_entries(records))
    num_bytes, file_bytes = entries[-1].stop if entries else 0, os.fstat(file).st_size
    if data_at + num_bytes != file_bytes:
        raise ValueError(f"{file_bytes} bytes, and the header describes {data_at + num_bytes}")
    memory = empty(num_bytes, UINT8)
    arrays = list[Array]()
    for each in entries:
        part = memory[each.start : each.stop]
        if _text(_kernels.read_file(file, data_at + each.start, address(part), len(part))) != each.digest:
            raise ValueError(f"{each.name} is damaged")
        arrays.append(part.view(each.dtype).reshape(each.shape))
    remaining = iter(arrays)
    return {
        str(name): Record(dict(entry["fields"]), {str(each): next(remaining) for each in entry["arrays"]})
        for name, entry in records.items()
    }


def _entries(records: Mapping[str, Any]) -> Iterator[_Array]:
    stop = 0
    for name, record in records.items():
        for part, entry in record["arrays"].items():
            dtype_text, shape, digest = entry
            dtype = DTYPES[dtype_text]
            if not 1 <= len(shape) <= MAX_DIMENSIONS or not all(type(size) is int and size >= 0 for size in shape):
                raise ValueError(f"{name} has a shape {shape!s:.60}")
            start = _rounded_up(stop, ALIGNMENT)
            stop = start + prod(shape) * dtype.itemsize
            yield _Array(f"{name} ({part})", dtype, tuple(shape), start, stop, digest)


def write_packed(path: Path, identity: Fields, made: PackedRecords, *, waits: bool = False) -> bool:
    """Write a file in place of one that is there, in one step: readers find the old one or the whole new one.

    Return False if another process is writing in the folder, unless this `waits` for it. OSError if it cannot be
    written; then nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent, waits=waits) as is_locked:
        if not is_locked:
            return False
        temporary = path.with_name(path.name + ".part")
        try:
            with temporary.open("wb") as file:
                for part in _file_parts(identity, made.records):
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(path.parent)
    return True


def _file_parts(identity: Fields, records: Mapping[str, Record]) -> Iterator[Any]:
    """Yield the bytes of a file in order, in buffers."""
    arrays = [np.ascontiguousarray(each) for record in records.values() for each in record.arrays.values()]
    octets = [each.reshape(-1).view(UINT8) for each in arrays]
    parts = zip(arrays, octets, strict=True)
    described = iter([[dtype_name(each.dtype), list(each.shape), digest_text(part)] for each, part in parts])
    entries = {
        name: {"fields": record.fields, "arrays": {each: next(described) for each in record.arrays}}
        for name, record in records.items()
    }
    text = json.dumps({"identity": identity, "records": entries}, separators=(",", ":")).encode()
    digest = bytes.fromhex(digest_text(np.frombuffer(text, UINT8)))
    start = MAGIC + len(text).to_bytes(LENGTH_BYTES, "little") + digest + text
    yield start + bytes(-len(start) % PAGE_BYTES)
    for number, part in enumerate(octets):
        yield part.data
        if number < len(octets) - 1:
            yield bytes(-len(part) % ALIGNMENT)


@contextmanager
def _locked(folder: Path, *, waits: bool) -> Iterator[bool]:
    """Lock a folder against other writers, and tell whether it is; the lock ends with the process."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(lock)


def _sync_folder(folder: Path) -> None:
    place = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def digest_text(octets: Array) -> str:
    """Return the digest of bytes, 16 hexadecimal digits."""
    return _text(_kernels.digest(address(octets), len(octets)))


def _text(digest: int) -> str:
    return digest.to_bytes(LENGTH_BYTES, "big").hex()


def _rounded_up(number: int, unit: int) -> int:
    return number + -number % unit


def _difference(found: object, wanted: object, place: str = "") -> str:
    """Return where two values first differ: "dtype float32, not bfloat16"."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in [*wanted, *found]:
            if found.get(key) != wanted.get(key):
                return _difference(found.get(key), wanted.get(key), f"{place}{key} " if len(place) < 60 else place)
    return f"{place}{found!s:.100}, not {wanted!s:.100}"
