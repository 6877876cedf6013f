"""Metadata of a GGUF file by the keys of its architecture, each value checked as it is read."""

import math
import struct

from quire.core.errors import ModelError
from quire.formats.gguf.gguf_file import GGUFFile, MetadataArray
from quire.model.config_reader import ConfigReader


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
