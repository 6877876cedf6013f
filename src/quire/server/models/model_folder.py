"""Models of a folder by name: subfolders with a config.json, GGUF files, or what the hub's cache holds.

    DIR/small/config.json           small
    DIR/owner/name/config.json      owner/name
    DIR/tiny-Q4_K_M.gguf            tiny-Q4_K_M
    DIR/models--owner--name/...     owner/name, and owner/name:Q4_K_M for a GGUF file

A name that a client sends is looked up in what was found, and never becomes a path.
"""

from collections.abc import Iterator
from pathlib import Path

from quire.core.checks import nearest
from quire.core.errors import ConfigError, ModelError
from quire.core.hub import GGUF_SUFFIX, snapshot_in, whole_gguf_files
from quire.core.model_files import is_gguf
from quire.server.errors import ApiError

MAX_MODELS = 1024
LATEST = ":latest"      # what Ollama's clients put behind a name
_HUB_PREFIX = "models--"


class ModelFolder:
    """The models below a folder, which may change while a server runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not folder.is_dir():
            raise ConfigError(f"models_dir {str(folder)!r} is no folder")
        self._paths = self._found()

    def names(self) -> dict[str, Path]:
        """Look again, and return the paths by name."""
        self._paths = self._found()
        return self._paths

    def path(self, name: str) -> Path:
        """Return the folder or file of a name. ModelError if there is none, also after another look."""
        known = self._paths.get(name)
        if known is not None and known.exists():
            return known
        found = self.names()
        if name not in found:
            there = f"; there are {', '.join(found)}" if len(found) <= 8 else ""
            raise ModelError(f"there is no model {name!r:.200}{nearest(name, found) or there}")
        return found[name]

    def served_name(self, asked: str) -> str:
        """Return the name of a model for one that a client sends, with or without ":latest". ApiError 404 for none."""
        if asked.endswith(LATEST) and asked not in self._paths:
            asked = asked.removesuffix(LATEST)
        try:
            self.path(asked)
        except ModelError as error:
            raise ApiError(404, str(error), param="model", code="model_not_found") from error
        return asked

    def _found(self) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for name, path in self._models_in(self._folder, ""):
            if name.isprintable():
                found.setdefault(name, path)
            if len(found) >= MAX_MODELS:
                break
        return found

    def _models_in(self, folder: Path, prefix: str) -> Iterator[tuple[str, Path]]:
        for path in sorted(each for each in folder.iterdir() if not each.name.startswith(".")):
            if path.name.startswith(_HUB_PREFIX) and not prefix:
                yield from _of_hub(path)
            elif (path / "config.json").is_file():
                yield prefix + path.name, path
            elif path.suffix == GGUF_SUFFIX and is_gguf(path):
                yield prefix + path.stem, path
            elif path.is_dir() and not prefix:
                yield from self._models_in(path, f"{path.name}/")


def _of_hub(cache: Path) -> Iterator[tuple[str, Path]]:
    """Yield the models of a repository in the hub's cache, at its default branch."""
    repo = cache.name.removeprefix(_HUB_PREFIX).replace("--", "/")
    folder = snapshot_in(cache)
    if folder is None:
        return
    files = [each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file()]
    if "config.json" in files and any(each.endswith(".safetensors") for each in files):
        yield repo, folder
    for tag, file in whole_gguf_files(repo, files).items():
        yield f"{repo}:{tag}", folder / file
