"""GGUF files: the metadata and the tensor table of llama.cpp's model files, versions 2 and 3, little-endian.

The file is untrusted: every count, length, dimension and offset is checked against a limit and the end of the file
before anything is allocated for it. No tensor is read here. A failed check raises ModelError with the file, the key
or tensor, the value and the limit.
"""

import math
import mmap
import struct
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import ModelError
from quire.core.model_files import GGUF_MAGIC
from quire.model.config_reader import MAX_SIZE, ConfigReader


class GGMLType(NamedTuple):
    """Element type: `block_size` elements are stored in `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 40),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
}


VERSIONS = (2, 3)
MAX_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_KEY_BYTES = 65_535         # as specified
MAX_TENSOR_NAME_BYTES = 128    # llama.cpp accepts 63
MAX_STRING_BYTES = 64 * 2**20  # as for a text file of a model folder
MAX_ARRAY_ITEMS = 2**21        # a vocabulary of a quarter of a million tokens has about half a million merges
MAX_DIMENSIONS = 4
MAX_DIMENSION = 2**40
MAX_ALIGNMENT = 2**16
DEFAULT_ALIGNMENT = 32

Scalar = int | float | bool | str

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # struct's codes
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6
_LENGTH = struct.Struct("<Q").unpack_from


class TensorEntry(NamedTuple):
    """A row of the tensor table. `shape` is rows first, as PyTorch has it; `offset` is that in the file, in bytes."""

    type: GGMLType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MetadataArray:
    """An array of the metadata, of which only the place is known yet: `strings`, `places` and `numbers` read it.

    `ends`: of strings, the bytes from `offset` to each one's end; of numbers empty.
    """

    item_type: int
    num_items: int
    offset: int
    num_bytes: int
    ends: NDArray[np.int64] = field(compare=False)

    def __repr__(self) -> str:
        return f"an array of {self.num_items} items"


class GGUFFile:
    """An open file, mapped into memory. Pages of the map may be written by the caller: the file never changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.map = _map(path)
        cursor = _Cursor(path, self.map)
        num_tensors, num_keys = _read_counts(cursor)
        self.metadata: dict[str, Scalar | MetadataArray] = dict(_read_metadata(cursor, num_keys))
        self.tensors: dict[str, TensorEntry] = dict(_read_tensors(cursor, num_tensors, self.metadata))

    def error(self, message: str) -> ModelError:
        """Return an error that names this file; the caller raises it."""
        return ModelError(f"{self.path}: {message}")

    def strings(self, key: str) -> list[str]:
        """Return an array of strings. ModelError if the key is missing, of another type or no UTF-8."""
        place = self._array(key, (_STRING,), "strings")
        stored, start, strings = self.map[place.offset : place.offset + place.num_bytes], 8, list[str]()
        try:
            for end in place.ends.tolist():  # 262,144 times for a vocabulary
                strings.append(stored[start:end].decode())
                start = end + 8
        except UnicodeDecodeError as error:
            raise self.error(f"{key} item {len(strings)} is not valid UTF-8: {error}") from error
        return strings

    def places(self, key: str, wanted: Iterable[str]) -> dict[str, int]:
        """Return where an array of strings has each of those that are `wanted`, the last place of equal ones.

        No other string is decoded. ModelError as in `strings`.
        """
        place, found = self._array(key, (_STRING,), "strings"), dict[str, int]()
        stored = np.frombuffer(self.map[place.offset : place.offset + place.num_bytes], np.uint8)
        starts = np.append(0, place.ends)[:-1] + 8
        sizes = place.ends - starts
        for text in wanted:
            encoded = text.encode()
            alike = np.flatnonzero(sizes == len(encoded))
            for at, byte in enumerate(encoded):
                alike = alike[stored[starts[alike] + at] == byte]
            if len(alike):
                found[text] = int(alike[-1])
        return found

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return an array of integers, floats or booleans. ModelError if the key is missing or of another type."""
        array = self._array(key, tuple(_NUMBERS), "numbers")
        return struct.unpack_from(f"<{array.num_items}{_NUMBERS[array.item_type]}", self.map, array.offset)

    def _array(self, key: str, item_types: tuple[int, ...], what: str) -> MetadataArray:
        array = self.metadata.get(key)
        if not isinstance(array, MetadataArray) or array.item_type not in item_types:
            found = "it is missing" if array is None else f"got {array!r:.80}"
            raise self.error(f"{key} must be an array of {what}, {found}")
        return array


class _Cursor:
    """A place in the file, from which values are read one after the other."""

    def __init__(self, path: Path, mapped: mmap.mmap, at: int = 0) -> None:
        self._path = path
        self._map = mapped
        self.at = at

    def __len__(self) -> int:
        return len(self._map)

    def error(self, message: str) -> ModelError:
        """Return an error that names the file."""
        return ModelError(f"{self._path}: {message}")

    def number(self, code: str, what: str) -> int | float | bool:
        """Return a number by its code of `struct`."""
        size = struct.calcsize(f"<{code}")
        self._require(size, what)
        (value,) = struct.unpack_from(f"<{code}", self._map, self.at)
        self.at += size
        assert isinstance(value, int | float)
        return value

    def count(self, what: str, limit: int, code: str = "Q") -> int:
        """Return an integer of at most `limit`."""
        value = int(self.number(code, what))
        if value > limit:
            raise self.error(f"{what} is {value}, the limit is {limit}")
        return value

    def string(self, what: str, limit: int = MAX_STRING_BYTES) -> str:
        """Return a string: its length, then so many bytes of UTF-8."""
        size = self.count(f"the length of {what}", limit)
        self._require(size, what)
        self.at += size
        try:
            return self._map[self.at - size : self.at].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not valid UTF-8: {error}") from error

    def array(self, key: str) -> MetadataArray:
        """Return the place of an array and pass over it."""
        item_type = self.count(f"the item type of {key}", 12, "I")
        num_items = self.count(f"the number of items of {key}", MAX_ARRAY_ITEMS)
        start, ends = self.at, np.empty(0, np.int64)
        if item_type == _STRING:
            ends = self._skip_strings(num_items, key)
        elif item_type in _NUMBERS:
            num_bytes = num_items * struct.calcsize(f"<{_NUMBERS[item_type]}")
            self._require(num_bytes, key)
            self.at += num_bytes
        else:
            raise self.error(f"{key} is an array of arrays, which are not supported")
        return MetadataArray(item_type, num_items, start, self.at - start, ends)

    def _skip_strings(self, num_items: int, key: str) -> NDArray[np.int64]:
        """Pass over strings; return the bytes from here to the end of each."""
        start, at, mapped, stop, ends = self.at, self.at, self._map, len(self._map), array("q")
        with suppress(struct.error):  # a length that is not all in the file
            for _ in range(num_items):
                at += 8 + _LENGTH(mapped, at)[0]
                if at > stop:
                    break
                ends.append(at - start)
        if len(ends) < num_items:
            raise self.error(f"{key} ends after the file, which has {stop} bytes: is the file complete?")
        self.at = at
        return np.array(ends, np.int64)

    def _require(self, num_bytes: int, what: str) -> None:
        if self.at + num_bytes > len(self._map):
            raise self.error(f"{what} at byte {self.at} takes {num_bytes} bytes, and the file has {len(self._map)}: "
                             "is the file complete?")


def _map(path: Path) -> mmap.mmap:
    """Map a file privately: PyTorch wants memory that can be written."""
    try:
        with path.open("rb") as file:
            if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
                raise ModelError(f"{path}: is no GGUF file: it does not begin with {GGUF_MAGIC.decode()}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: cannot be read: {error}") from error


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """Read the header; return the numbers of tensors and of metadata keys."""
    cursor.at = len(GGUF_MAGIC)
    version = int(cursor.number("I", "the version"))
    if version not in VERSIONS:
        is_swapped = version.to_bytes(4, "little")[::-1] in [known.to_bytes(4, "little") for known in VERSIONS]
        why = "the file is big-endian" if is_swapped else f"supported are {VERSIONS[0]} and {VERSIONS[1]}"
        raise cursor.error(f"GGUF version {version} is not supported: {why}")
    num_tensors = cursor.count("the number of tensors", MAX_TENSORS)
    return num_tensors, cursor.count("the number of metadata keys", MAX_KEYS)


def _read_metadata(cursor: _Cursor, num_keys: int) -> Iterator[tuple[str, Scalar | MetadataArray]]:
    """Yield keys and values. ModelError for a key that comes twice, or an unknown type of value."""
    seen = set()
    for index in range(num_keys):
        key = cursor.string(f"metadata key {index}", MAX_KEY_BYTES)
        if key in seen:
            raise cursor.error(f"metadata key {key!r:.80} comes twice")
        seen.add(key)
        yield key, _read_value(cursor, f"{key!r:.80}"[1:-1])


def _read_value(cursor: _Cursor, key: str) -> Scalar | MetadataArray:
    value_type = cursor.count(f"the type of {key}", 12, "I")
    if value_type == _ARRAY:
        return cursor.array(key)
    if value_type == _STRING:
        return cursor.string(key)
    value = cursor.number(_NUMBERS[value_type], key)
    return _shortest(value) if value_type == _FLOAT32 else value


def _shortest(value: float) -> float:
    """Return the shortest decimal number that is `value` in float32: 1e-05, of which the file has the float32.

    A config.json has such numbers in decimal. With the same double, all that is computed from it has the same bits.
    """
    return float(str(np.float32(value)))


def _read_tensors(
    cursor: _Cursor, num_tensors: int, metadata: dict[str, Scalar | MetadataArray]
) -> Iterator[tuple[str, TensorEntry]]:
    """Yield names and entries, of which every one lies inside of the file."""
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or not _is_alignment(alignment):
        raise cursor.error(f"general.alignment must be a power of two from 8 to {MAX_ALIGNMENT}, got {alignment!r:.80}")
    entries: dict[str, TensorEntry] = {}
    for index in range(num_tensors):
        name = cursor.string(f"the name of tensor {index}", MAX_TENSOR_NAME_BYTES)
        if name in entries:
            raise cursor.error(f"tensor {name!r} comes twice")
        entries[name] = _read_entry(cursor, f"tensor {name!r}", alignment)
    begin = -(-cursor.at // alignment) * alignment
    for name, entry in entries.items():
        placed = entry._replace(offset=begin + entry.offset)
        if placed.offset + placed.num_bytes > len(cursor):
            raise cursor.error(
                f"tensor {name!r} of {placed.num_bytes} bytes at byte {placed.offset} ends after the file, which has "
                f"{len(cursor)} bytes: is the file complete?"
            )
        yield name, placed


def _is_alignment(value: int) -> bool:
    return 8 <= value <= MAX_ALIGNMENT and value & (value - 1) == 0


def _read_entry(cursor: _Cursor, what: str, alignment: int) -> TensorEntry:
    """Read shape, type and offset of a tensor; the offset is that behind the table."""
    num_dimensions = cursor.count(f"the number of dimensions of {what}", MAX_DIMENSIONS, "I")
    sizes = [cursor.count(f"a dimension of {what}", MAX_DIMENSION) for _ in range(num_dimensions)]
    type_id = int(cursor.number("I", f"the type of {what}"))
    if type_id not in GGML_TYPES:
        raise cursor.error(f"{what} has the unknown type {type_id}")
    kind, num_elements = GGML_TYPES[type_id], math.prod(sizes)
    if not sizes or 0 in sizes or num_elements > MAX_DIMENSION:
        raise cursor.error(f"{what} must have 1 to {MAX_DIMENSION} elements in all, and has the shape {sizes[::-1]}")
    if sizes[0] % kind.block_size:
        raise cursor.error(f"{what} has rows of {sizes[0]} elements, which are no whole {kind.name} blocks of "
                           f"{kind.block_size}")
    offset = int(cursor.number("Q", f"the offset of {what}"))
    if offset % alignment:
        raise cursor.error(f"{what} has the offset {offset}, which is not a multiple of the alignment {alignment}")
    return TensorEntry(kind, tuple(sizes[::-1]), offset, num_elements // kind.block_size * kind.block_bytes)


class Metadata(ConfigReader):
    """The metadata of a file's architecture: values by the keys behind its name, with which errors name them."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file, self._prefix = file, f"{architecture}."
        ours = {key: value for key, value in file.metadata.items() if key.startswith(self._prefix)}
        super().__init__({key.removeprefix(self._prefix): ours[key] for key in ours}, str(file.path))

    def error(self, message: str) -> ModelError:
        """Return an error that names the file, with a message that begins with a key."""
        return super().error(self._prefix + message)

    def has_tensor(self, name: str) -> bool:
        """Return whether the file has a tensor."""
        return name in self.file.tensors

    def windowed(self, key: str, count: int, every: int) -> list[bool]:
        """Return, for each of `count` layers, whether it has a window: as a list says, or all but each n-th.

        The key has the list or n; `every` is n where it is missing.
        """
        if not isinstance(self.raw(key), MetadataArray):
            every = self.size(key, every)
            return [(index + 1) % every != 0 for index in range(count)]
        found = self.file.numbers(self._prefix + key)
        if len(found) != count or any(each not in (0, 1) for each in found):
            raise self.error(f"{key} must be a list of {count} times 0 or 1, got {len(found)} items")
        return [bool(each) for each in found]

    def counts(self, key: str, num_layers: int) -> list[int]:
        """Return a list of `num_layers` counts, 0 or more."""
        found = self.file.numbers(self._prefix + key)
        if len(found) != num_layers or any(each not in range(MAX_SIZE) for each in found):
            raise self.error(f"{key} must be a list of {num_layers} numbers, 0 or more, got {len(found)} items")
        return [int(each) for each in found]

    def counts_or_size(self, key: str, num_layers: int) -> list[int]:
        """Return a size for each of `num_layers` layers: one for all, or a list of them."""
        if isinstance(self.raw(key), MetadataArray):
            return self.counts(key, num_layers)
        return [self.size(key)] * num_layers

    def divisors(self, name: str, num_pairs: int) -> tuple[float, ...]:
        """Return a vector of the file: the number by which the frequency of each pair is divided."""
        if not self.has_tensor(name):
            raise self.file.error(f"tensor {name} is missing")
        entry = self.file.tensors[name]
        if entry.type.name != "F32" or entry.shape != (num_pairs,):
            found = f"{entry.type.name} of shape {list(entry.shape)}"
            raise self.file.error(f"tensor {name} must be F32 of shape {[num_pairs]}, and is {found}")
        divisors = struct.unpack_from(f"<{num_pairs}f", self.file.map, entry.offset)
        if not all(math.isfinite(each) and each > 0 for each in divisors):
            raise self.file.error(f"tensor {name} has values that are not above 0")
        return divisors

    def rows(self, name: str) -> int:
        """Return the rows of a tensor, which must be there."""
        if not self.has_tensor(name):
            raise self.file.error(f"tensor {name} is missing")
        return self.file.tensors[name].shape[0]
