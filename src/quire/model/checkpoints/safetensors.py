"""Safetensors checkpoint: a folder with one file, or with shards listed in an index. Never pickle.

A tensor is read through a memory map of its file. Pages that were read count as this process's memory for as long as
they are mapped, so a file is mapped afresh every so often.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.core.errors import ModelError
from quire.core.model_files import file_inside, read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
REMAP_BYTES = 64 << 20  # read from one map: 12 maps for a model of 0.8 GB, where one for each tensor takes 0.2 s

T = TypeVar("T")


class SafetensorsCheckpoint:
    """A `Checkpoint` of a folder. Construction reads the headers of all files and no weight."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = _shards(folder)
        self._mapped: tuple[Path, Any] | None = None
        self._bytes_read = 0  # from the file that is mapped

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def location(self, name: str | None = None) -> str:
        """Return the file of a tensor, or the folder."""
        return str(self._folder if name is None else self._files[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._in_file(name, lambda file: tuple(file.get_slice(name).get_shape()))

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor, as the file names it."""
        return self._in_file(name, lambda file: str(file.get_slice(name).get_dtype()))

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a tensor, in the file's memory where they are all of its rows."""
        tensor = self._in_file(name, lambda file: _rows(file, name, start, stop))
        self._bytes_read += tensor.nbytes
        return tensor

    def _in_file(self, name: str, read: Callable[[Any], T]) -> T:
        """Return what `read` gets out of the mapped file of a tensor."""
        path = self._files[name]
        try:
            return read(self._map(path))
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{path}: cannot read tensor {name}: {error}") from error

    def _map(self, path: Path) -> Any:  # noqa: ANN401 (the methods of safe_open have no types)
        if self._mapped is None or self._mapped[0] != path or self._bytes_read > REMAP_BYTES:
            self._mapped, self._bytes_read = (path, safe_open(path, framework="pt")), 0
        return self._mapped[1]


def _rows(file: Any, name: str, start: int, stop: int) -> Tensor:  # noqa: ANN401 (of safe_open)
    """Return some rows of a tensor: a whole one is not copied."""
    entry = file.get_slice(name)
    is_whole = (start, stop) == (0, (entry.get_shape() or [1])[0])
    tensor: Tensor = file.get_tensor(name) if is_whole else entry[start:stop]
    return tensor


def _shards(folder: Path) -> dict[str, Path]:
    """Map each tensor name to its file. The single file wins over an index, as in transformers."""
    if (folder / SINGLE_FILE).exists():
        path = file_inside(folder, SINGLE_FILE)
        return dict.fromkeys(_names_in(path), path)
    if not (folder / INDEX_FILE).exists():
        raise ModelError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}; other weight formats are not read")
    weight_map = read_json_object(folder, INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelError(f"{folder / INDEX_FILE}: weight_map must map tensor names to file names")
    files = {file: file_inside(folder, file) for file in sorted(set(weight_map.values()))}
    names_in = {file: _names_in(path) for file, path in files.items()}
    for name, file in weight_map.items():
        if name not in names_in[file]:
            raise ModelError(f"{folder / INDEX_FILE}: places tensor {name} in {file}, which does not have it")
    return {name: files[file] for name, file in weight_map.items()}


def _names_in(path: Path) -> set[str]:
    """Return the names of the tensors in a file; its header and length are checked."""
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ModelError(f"{path}: not a whole safetensors file: {error}") from error
