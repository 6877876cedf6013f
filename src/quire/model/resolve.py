"""Model resolution: the bundled model, a local folder, a local GGUF file, or the folder of a hub id; digests."""

import hashlib
import logging
import re
from pathlib import Path

from quire.core.errors import ModelError
from quire.core.model_files import is_gguf
from quire.model.config_reader import CONFIG_FILE

log = logging.getLogger(__name__)

DEMO_MODEL = Path(__file__).parent / "demo"
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "merges.txt")
TOKENIZER_FILES = ("*.json", "*.jinja", "tokenizer*", "merges.txt")
HUB_FILES_LEFT_OUT = ["original/*", "consolidated*"]  # a second copy of the weights, in the publisher's own format
DIGEST_SUFFIXES = (".json", ".safetensors", ".gguf")
DIGEST_END_BYTES = 1 << 16


def resolve_model(model: str | None, files: tuple[str, ...] = HUB_FILES, revision: str | None = None) -> Path:
    """Return the folder of `model`, or its GGUF file; None is the bundled demo model.

    The `files` of a hub id are downloaded into the hub's cache, or found there without network, at a `revision` (a
    branch, a tag or a commit; None: the default branch), which folders and files do not have. Raises ModelError with
    the sources that were tried.
    """
    if model is None:
        return _demo_model()
    folder = Path(model).expanduser()
    try:
        is_there = folder.exists()
    except OSError as error:  # a name that no file can have
        raise ModelError(f"{model[:80]!r}: is no folder and no file: {error.strerror}") from error
    if model and (folder.is_dir() or is_gguf(folder)):
        return folder
    if model and is_there:
        raise ModelError(f"{model}: is no GGUF file; expected one, or a folder with {CONFIG_FILE} and safetensors")
    if folder.suffix == ".gguf":
        raise ModelError(f"{model}: no such file")
    if not _is_hub_id(model):
        raise ModelError(f"{model!r}: no such folder, and not a hub id of the form owner/name")
    return _from_hub(model, files, revision)


def resolve_tokenizer(tokenizer: str | None, model: Path, revision: str | None = None) -> Path:
    """Return the folder or file with the tokenizer named, or without a name that of the model found."""
    return model if tokenizer is None else resolve_model(tokenizer, TOKENIZER_FILES, revision)


def _demo_model() -> Path:
    if not (DEMO_MODEL / CONFIG_FILE).is_file():
        raise ModelError(f"the bundled demo model is not in this installation: no {CONFIG_FILE} in {DEMO_MODEL}")
    return DEMO_MODEL


def _is_hub_id(model: str) -> bool:
    parts = model.split("/")
    return len(parts) <= 2 and all(part and part[0].isalnum() for part in parts)


def _from_hub(model: str, files: tuple[str, ...], revision: str | None) -> Path:
    try:
        return Path(_snapshot(model, files, revision, local_files_only=False))
    except Exception as error:  # the hub client raises its HTTP library's errors as well
        log.debug("download of %s failed", model, exc_info=True)
        reason = error
    try:
        return Path(_snapshot(model, files, revision, local_files_only=True))  # some proxies hide the cache from it
    except Exception:
        raise ModelError(
            f"{model}{_at(revision)}: no such local folder; the hub could not give it ({_cause(reason)}); and the "
            "hub's local cache does not have it"
        ) from reason


def _at(revision: str | None) -> str:
    return "" if revision is None else f" (revision {revision!r:.100})"


def _snapshot(model: str, files: tuple[str, ...], revision: str | None, *, local_files_only: bool) -> str:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (0.3 s that a folder can start without)

    return str(
        snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(files),
            ignore_patterns=HUB_FILES_LEFT_OUT,
            local_files_only=local_files_only,
        )
    )


def _cause(error: Exception) -> str:
    """Return the first line of an error, or of the one that its hub client wraps, without names of classes."""
    text = (str(error).strip() or "no message").splitlines()[0]
    return re.sub(r"\(?\bGot: \w+(?:Error|Exception|Timeout): (.*?)\)?$", r"\1", text)


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
