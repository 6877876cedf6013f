"""Untrusted files of models: never outside of the folder, never larger than such files are."""

import json
from pathlib import Path

from quire.core.errors import ModelError

GGUF_MAGIC = b"GGUF"  # the first bytes of llama.cpp's model files
MAX_TEXT_BYTES = 64 * 2**20  # the largest real ones are tokenizers of a quarter of a million tokens: 33 MiB


def is_gguf(path: Path) -> bool:
    """Return whether `path` is a regular file that begins as a GGUF file does, or has the suffix of one."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return path.suffix == ".gguf" or file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return False


def file_inside(folder: Path, name: str, subfolder: str = "") -> Path:
    """Return the path of file `name` of `folder`, or of a subfolder.

    `name` must be a plain file name, and the file a regular one that really lies in the folder: links out of it are
    refused, but for those of the hub's cache (models--*/snapshots/REVISION), which lead to its own blobs. Raises
    ModelError.
    """
    for part in (name, subfolder) if subfolder else (name,):
        if part != Path(part).name or "\\" in part or "\0" in part or part in ("", ".", ".."):
            raise ModelError(f"{folder}: {part!r:.300} is not a plain file name")
    path, root = folder / subfolder / name, folder.resolve()
    if not path.is_file():
        raise ModelError(f"{folder}: no file {name}")
    target = path.resolve()
    if not any(target.is_relative_to(allowed) for allowed in (root, *_hub_blobs(root))):
        raise ModelError(f"{path}: links to {target}, outside of the model folder")
    return path


def read_bytes(folder: Path, name: str) -> bytes:
    """Return the content of file `name` of `folder`. ModelError names it if it is missing or too large."""
    path = file_inside(folder, name)
    try:
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise ModelError(f"{path}: larger than {MAX_TEXT_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


def read_text(folder: Path, name: str, subfolder: str = "") -> str:
    """Return the text of file `name` of `folder`. ModelError names it if it is missing, too large or no UTF-8."""
    path = file_inside(folder, name, subfolder)
    try:
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise ModelError(f"{path}: larger than {MAX_TEXT_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read as text: {error}") from error


def read_json(folder: Path, name: str, subfolder: str = "") -> object:
    """Return the JSON in file `name` of `folder`, or of a subfolder. ModelError as `read_text`, and if it is none."""
    text = read_text(folder, name, subfolder)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{folder / subfolder / name}: cannot be read as JSON: {error}") from error


def read_json_object(folder: Path, name: str, subfolder: str = "") -> dict[str, object]:
    """Return the JSON object in a file. ModelError as `read_json`, and if it is something else."""
    content = read_json(folder, name, subfolder)
    if not isinstance(content, dict):
        raise ModelError(f"{folder / subfolder / name}: expected a JSON object, found {type(content).__name__}")
    return content


def _hub_blobs(folder: Path) -> list[Path]:
    """The folder of blobs that a snapshot in the hub's cache may link to; empty for any other folder."""
    snapshots, model = folder.parent, folder.parent.parent
    is_snapshot = snapshots.name == "snapshots" and model.name.startswith("models--")
    return [model / "blobs"] if is_snapshot else []
