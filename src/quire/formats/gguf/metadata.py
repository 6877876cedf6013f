"""Metadata of a GGUF file by the keys of its architecture, each value checked as it is read."""

from quire.core.errors import ModelError
from quire.formats.gguf.file import GGUFFile
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

    def rows(self, name: str) -> int:
        """Return the rows of a tensor, which must be there."""
        if not self.has_tensor(name):
            raise self.file.error(f"tensor {name} is missing")
        return self.file.tensors[name].shape[0]
