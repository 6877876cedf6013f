"""The tensors of a model folder: one safetensors file, or shards listed in an index. Never pickle.

A tensor is read through a memory map of its file. Pages that were read count as this process's memory for as long as
they are mapped, so a file is mapped afresh every so often.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.core.errors import ModelError
from quire.core.model_files import file_inside, read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
REMAP_BYTES = 64 << 20  # read from one map: 12 maps for a model of 0.8 GB, where one for each tensor takes 0.2 s
READABLE_DTYPES = ("F64", "F32", "F16", "BF16")


class SafetensorsCheckpoint:
    """Where each tensor of a folder is. Construction reads the headers of all files and no weight."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = _shards(folder)
        self._mapped: tuple[Path, Any] | None = None
        self._bytes_read = 0  # from what is mapped

    @property
    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return self._files.keys()

    def file_of(self, name: str) -> Path:
        """The file that holds tensor `name`, which must be here."""
        return self._files[name]

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return tensor `name` as the file has it, on the CPU, in the file's memory: copy it soon and let go of it.

        Raises ModelError, before anything is read, if it is missing, has another shape or is not floating-point.
        """
        if name not in self._files:
            raise ModelError(f"{self._folder}: tensor {name} is missing; expected shape {list(shape)}")
        path = self._files[name]
        try:
            file = self._map(path)
            entry = file.get_slice(name)
            self._check(path, name, entry.get_dtype(), entry.get_shape(), list(shape))
            tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{path}: cannot read tensor {name}: {error}") from error
        self._bytes_read += tensor.nbytes
        return tensor

    def _map(self, path: Path) -> Any:  # noqa: ANN401 (the methods of safe_open have no types)
        if self._mapped is None or self._mapped[0] != path or self._bytes_read > REMAP_BYTES:
            self._mapped, self._bytes_read = (path, safe_open(path, framework="pt")), 0
        return self._mapped[1]

    @staticmethod
    def _check(path: Path, name: str, dtype: str, found: list[int], expected: list[int]) -> None:
        if found != expected:
            raise ModelError(f"{path}: tensor {name} has shape {found}, expected {expected}")
        if dtype not in READABLE_DTYPES:
            raise ModelError(
                f"{path}: tensor {name} has dtype {dtype}, expected one of {', '.join(READABLE_DTYPES)}: "
                "quantized checkpoints are not supported yet"
            )


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
    """Names of the tensors in a file, whose header and length are checked on the way."""
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ModelError(f"{path}: not a whole safetensors file: {error}") from error
