"""Safetensors checkpoint: a folder with one file, or with shards listed in an index. Never pickle.

The library checks a file's header and length. What the header says of tensors is read again here, and checked against
the file that is mapped: through NumPy the library returns no bfloat16. Pages that were read count as this process's
memory while they are mapped, so they are dropped every so often; they would be read from the file again.
"""

import json
import mmap
from collections.abc import Collection
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from quire.core.arrays import STORED_DTYPES, Array
from quire.core.errors import ModelError
from quire.core.model_files import file_inside, read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LENGTH_BYTES = 8           # the header's length, in front of it
RESIDENT_BYTES = 64 << 20  # read before pages are dropped


class StoredTensor(NamedTuple):
    """A tensor's place in its file: bytes [start, stop). `dtype`: as the file names it."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """A file that is mapped, its header checked. ModelError if it is not whole, or changes while it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, framework="np"), path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # PyTorch wants memory to write to
            self.tensors = _tensors(self._map)
        except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
            raise ModelError(f"{path}: not a whole safetensors file: {error}") from error
        for name, entry in self.tensors.items():
            dtype, num_bytes = STORED_DTYPES.get(entry.dtype), entry.stop - entry.start
            if not LENGTH_BYTES <= entry.start <= entry.stop <= len(self._map):
                raise ModelError(f"{path}: tensor {name} ends at byte {entry.stop} of a file of {len(self._map)}")
            if dtype is not None and num_bytes != prod(entry.shape) * dtype.itemsize:
                raise ModelError(f"{path}: tensor {name} of shape {list(entry.shape)} has {num_bytes} bytes")

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return rows [start, stop) of a tensor of one of STORED_DTYPES, in the file's memory."""
        entry = self.tensors[name]
        dtype = STORED_DTYPES[entry.dtype]
        octets = np.frombuffer(self._map, np.uint8, entry.stop - entry.start, entry.start)
        if entry.start % dtype.itemsize:  # no tensor of PyTorch begins in the middle of an element
            octets = octets.copy()
        whole = octets.view(dtype).reshape(entry.shape)
        return whole[start:stop] if entry.shape else whole

    def drop_pages(self) -> None:
        """Let the pages go that have been read."""
        self._map.madvise(mmap.MADV_DONTNEED)


def _tensors(mapped: mmap.mmap) -> dict[str, StoredTensor]:
    """Return the tensors of a file, in the order of its header, which the library has checked."""
    begin = LENGTH_BYTES + int.from_bytes(mapped[:LENGTH_BYTES], "little")
    found = dict[str, StoredTensor]()
    for name, entry in json.loads(mapped[LENGTH_BYTES:begin]).items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            shape = tuple(map(int, entry["shape"]))
            found[name] = StoredTensor(str(entry["dtype"]), shape, begin + start, begin + stop)
    return found


class SafetensorsCheckpoint:
    """A `Checkpoint` of a folder. Construction reads the headers of all files and no weight."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = _shards(folder)
        self._read: SafetensorsFile | None = None  # last
        self._bytes_read = 0                       # since the file's pages were dropped

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def location(self, name: str | None = None) -> str:
        """Return the file of a tensor, or the folder."""
        return str(self._folder if name is None else self._files[name].path)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._files[name].tensors[name].shape

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor, as the file names it."""
        return self._files[name].tensors[name].dtype

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return rows [start, stop) of a tensor, in the file's memory."""
        file = self._files[name]
        if self._read is not None and (self._read is not file or self._bytes_read > RESIDENT_BYTES):
            self._read.drop_pages()
            self._bytes_read = 0
        found = file.read(name, start, stop)
        self._read, self._bytes_read = file, self._bytes_read + found.nbytes
        return found


def _shards(folder: Path) -> dict[str, SafetensorsFile]:
    """Map each tensor name to its file. The single file wins over an index, as in transformers."""
    if (folder / SINGLE_FILE).exists():
        single = SafetensorsFile(file_inside(folder, SINGLE_FILE))
        return dict.fromkeys(single.tensors, single)
    if not (folder / INDEX_FILE).exists():
        raise ModelError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}; other weight formats are not read")
    weight_map = read_json_object(folder, INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelError(f"{folder / INDEX_FILE}: weight_map must map tensor names to file names")
    files = {file: SafetensorsFile(file_inside(folder, file)) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in files[file].tensors:
            raise ModelError(f"{folder / INDEX_FILE}: places tensor {name} in {file}, which does not have it")
    return {name: files[file] for name, file in weight_map.items()}
