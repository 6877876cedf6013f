"""Paths inside a model folder: a file that a config or an index names never leads out of the folder."""

from pathlib import Path

from quire.core.errors import ModelError


def file_inside(folder: Path, name: str) -> Path:
    """Return the path of file `name` of `folder`.

    `name` must be a plain file name, and the file a regular one that really lies in the folder: links out of it are
    refused, but for those of the hub's cache (models--*/snapshots/REVISION), which lead to its own blobs. Raises
    ModelError.
    """
    if name != Path(name).name or "\\" in name or "\0" in name or name in ("", ".", ".."):
        raise ModelError(f"{folder}: {name!r} is not a plain file name")
    path, root = folder / name, folder.resolve()
    if not path.is_file():
        raise ModelError(f"{folder}: no file {name}")
    target = path.resolve()
    if not any(target.is_relative_to(allowed) for allowed in (root, *_hub_blobs(root))):
        raise ModelError(f"{path}: links to {target}, outside of the model folder")
    return path


def _hub_blobs(folder: Path) -> list[Path]:
    """The folder of blobs that a snapshot in the hub's cache may link to; empty for any other folder."""
    snapshots, model = folder.parent, folder.parent.parent
    is_snapshot = snapshots.name == "snapshots" and model.name.startswith("models--")
    return [model / "blobs"] if is_snapshot else []
