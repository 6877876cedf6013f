"""Model resolution: the bundled model, a folder, a GGUF file, an alias of the user's, or a hub id; digests."""

import hashlib
from pathlib import Path

from quire.core.errors import ModelError
from quire.core.hub import HUB_FILES, TOKENIZER_FILES, HubName, from_hub, parse_hub_name, read_aliases
from quire.core.model_files import is_gguf
from quire.model.config_reader import CONFIG_FILE

DEMO_MODEL = Path(__file__).parent / "demo"
DIGEST_SUFFIXES = (".json", ".safetensors", ".gguf")
DIGEST_END_BYTES = 1 << 16


def resolve_model(model: str | None, files: tuple[str, ...] = HUB_FILES, revision: str | None = None) -> Path:
    """Return the folder of `model`, or its GGUF file; None is the bundled demo model.

    A name that is neither may be an alias of the user's (`read_aliases` of `quire.core.hub`), then a hub id,
    "owner/name" or "owner/name:Q4_K_M". The `files` of a hub id are downloaded into the hub's cache, or found there
    without network, at a `revision` (a branch, a tag or a commit; None: the default branch), which folders and files do
    not have. Raises ModelError with the sources that were tried.
    """
    if model is None:
        return _demo_model()
    found = locate(model)
    return found if isinstance(found, Path) else from_hub(found, files, revision)


def locate(model: str) -> Path | HubName:
    """Return the folder or the GGUF file that a name stands for, or else its hub id. ModelError as `resolve_model`."""
    if (found := find_local(model)) is not None:
        return found
    target = unaliased(model)
    if target != model and (found := find_local(target)) is not None:
        return found
    name = parse_hub_name(target)
    if name is None:
        told = "" if target == model else f", the alias of {target!r}"
        raise ModelError(f"{model!r}{told}: no such folder, and not a hub id of the form owner/name")
    return name


def unaliased(model: str) -> str:
    """Return what an alias of the user's stands for; any other name as it is. ModelError for a file that is broken."""
    return model if not model or "/" in model or ":" in model else read_aliases().get(model, model)


def find_local(model: str) -> Path | None:
    """Return the folder or GGUF file at a path; None where there is nothing. ModelError for any other file."""
    folder = Path(model).expanduser()
    try:
        is_there = folder.exists()
    except OSError as error:  # a name that no file can have
        raise ModelError(f"{model[:80]!r}: is no folder and no file: {error.strerror}") from error
    if model and (folder.is_dir() or is_gguf(folder)):
        return folder
    if model and is_there:
        raise ModelError(f"{model}: is no GGUF file; expected one, or a folder with {CONFIG_FILE} and safetensors")
    if folder.suffix == ".gguf" and ":" not in model:
        raise ModelError(f"{model}: no such file")
    return None


def resolve_tokenizer(tokenizer: str | None, model: Path, revision: str | None = None) -> Path:
    """Return the folder or file with the tokenizer named, or without a name that of the model found."""
    return model if tokenizer is None else resolve_model(tokenizer, TOKENIZER_FILES, revision)


def _demo_model() -> Path:
    if not (DEMO_MODEL / CONFIG_FILE).is_file():
        raise ModelError(f"the bundled demo model is not in this installation: no {CONFIG_FILE} in {DEMO_MODEL}")
    return DEMO_MODEL


def model_digest(path: Path) -> str:
    """Return the digest of a folder's weights and configuration, or of a file: names, sizes and the ends of each.

    Ranks compare it to notice that they read different models.
    """
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.suffix in DIGEST_SUFFIXES)
    found = hashlib.sha256()
    for each in files:
        with each.open("rb") as file:
            size = file.seek(0, 2)
            found.update(f"{each.name} {size}\n".encode(errors="replace"))
            for start in (0, max(0, size - DIGEST_END_BYTES)):
                file.seek(start)
                found.update(file.read(DIGEST_END_BYTES))
    return found.hexdigest()
