"""Models of a hub by name: an alias of the user's, a repository, or one GGUF file of a repository.

Downloads, their resumption after a broken transfer, and the cache are those of huggingface_hub, which reads
HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE. It takes 0.3 s to import, which a folder can start without: hence the
imports inside functions.
"""

import contextlib
import glob
import hashlib
import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from quire.core.checks import nearest
from quire.core.errors import ModelError

log = logging.getLogger(__name__)

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "merges.txt")
TOKENIZER_FILES = ("*.json", "*.jinja", "tokenizer*", "merges.txt")
HUB_FILES_LEFT_OUT = ["original/*", "consolidated*"]  # a second copy of the weights, in the publisher's own format
GGUF_SUFFIX = ".gguf"
MAX_ALIAS_BYTES = 2**20
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_TAG = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|F16|F32))\.gguf$", re.IGNORECASE)


class HubName(NamedTuple):
    """A repository, "owner/name", and of one with GGUF files the file: by its quantization (Q4_K_M) or its name."""

    repo: str
    pick: str | None = None

    def __str__(self) -> str:
        """Return the name as users write it."""
        return self.repo if self.pick is None else f"{self.repo}:{self.pick}"


class HubFile(NamedTuple):
    """A file of a repository. `digest`: SHA-256 of one in LFS, or the SHA-1 by which git knows a small one."""

    name: str
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository at a commit, as the hub describes it. `gguf_architecture`: of its GGUF files, where the hub says."""

    name: HubName
    commit: str
    files: tuple[HubFile, ...]
    gguf_architecture: str | None

    def wanted(self, patterns: Sequence[str]) -> list[HubFile]:
        """Return the files that fit a pattern, or the one that the name picks. ModelError where there is none."""
        if self.name.pick is not None:
            chosen = pick_gguf(self.name, [each.name for each in self.files])
            return [each for each in self.files if each.name == chosen]
        return [each for each in self.files if _is_wanted(each.name, patterns)]


def _is_wanted(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, each) for each in patterns) and not any(fnmatch(name, each) for each in HUB_FILES_LEFT_OUT)


def parse_hub_name(text: str) -> HubName | None:
    """Return the repository and the pick of "owner/name:PICK"; None for what no hub can have."""
    repo, colon, pick = text.partition(":")
    parts = repo.split("/")
    if len(parts) > 2 or not all(part and part[0].isalnum() for part in parts) or bool(colon) != bool(pick):
        return None
    return HubName(repo, pick or None)


def aliases_file() -> Path:
    """Return the path of the user's file of aliases, which need not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "quire" / "models.toml"


def read_aliases() -> dict[str, str]:
    """Return the models by the user's own names. ModelError for a file that is not understood."""
    import tomllib  # noqa: PLC0415 (for names that are no folder)

    path = aliases_file()
    try:
        with path.open("rb") as file:
            text = file.read(MAX_ALIAS_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if len(text) > MAX_ALIAS_BYTES:
        raise ModelError(f"{path}: larger than {MAX_ALIAS_BYTES} bytes")
    try:
        content = tomllib.loads(text.decode())
    except ValueError as error:
        raise ModelError(f"{path}: is not valid TOML: {error}") from error
    models = content.pop("models", {})
    if content or not isinstance(models, dict) or not all(isinstance(each, str) and each for each in models.values()):
        raise ModelError(f'{path}: expected one table [models] with lines NAME = "folder, GGUF file or hub id"')
    return models


def pick_gguf(name: HubName, files: Sequence[str]) -> str:
    """Return the GGUF file that a name picks among the files of its repository. ModelError names what there is."""
    found = [each for each in files if each.lower().endswith(GGUF_SUFFIX) and "mmproj" not in each.lower()]
    pick = (name.pick or "").lower()
    chosen = [each for each in found if pick in (each.lower(), PurePosixPath(each).name.lower(), _tag(each).lower())]
    whole = [each for each in chosen if not _PART.search(each)]
    if len(whole) == 1:
        return whole[0]
    if len(whole) > 1:
        raise ModelError(f"{name}: fits several files: {', '.join(whole)}; name one, as {name.repo}:{whole[0]}")
    if chosen:
        raise ModelError(f"{name}: is in {len(chosen)} parts, and only whole GGUF files are read: merge them")
    choices = sorted({_tag(each) for each in found})
    there = f"; there are {', '.join(choices)}" if choices else ": the repository has no GGUF files"
    raise ModelError(f"{name}: no such GGUF file{there}{nearest(name.pick or '', choices)}")


def _tag(file: str) -> str:
    """Return the quantization in the name of a GGUF file (also of one in parts), else the name."""
    found = _TAG.search(_PART.sub(GGUF_SUFFIX, file))
    return PurePosixPath(file).name if found is None else found[1]


def gguf_tags(files: Iterable[str]) -> list[str]:
    """Return what picks each GGUF file of a repository."""
    return sorted({_tag(each) for each in files if each.lower().endswith(GGUF_SUFFIX) and "mmproj" not in each.lower()})


def whole_gguf_files(repo: str, files: Sequence[str]) -> dict[str, str]:
    """Return the GGUF file that each tag picks, without those in parts and tags that several files have."""
    found = {}
    for tag in gguf_tags(files):
        with contextlib.suppress(ModelError):
            found[tag] = pick_gguf(HubName(repo, tag), files)
    return found


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE forbids to ask the hub."""
    from huggingface_hub import constants  # noqa: PLC0415

    return bool(constants.HF_HUB_OFFLINE)


def find_on_hub(name: HubName, revision: str | None = None) -> HubModel:
    """Ask the hub for the files of a repository, their sizes and digests. ModelError if it does not answer."""
    from huggingface_hub import HfApi  # noqa: PLC0415

    try:
        found = HfApi().model_info(name.repo, revision=revision, files_metadata=True)
    except Exception as error:  # its HTTP library's errors as well
        raise ModelError(f"{name}{at(revision)}: the hub could not give it ({cause(error)})") from error
    gguf = getattr(found, "gguf", None) or {}
    files = []
    for each in found.siblings or ():
        path = PurePosixPath(each.rfilename)
        if path.is_absolute() or ".." in path.parts or "\\" in each.rfilename:
            raise ModelError(f"{name}: the hub names a file {each.rfilename!r:.200}, outside of the model's folder")
        lfs = each.lfs
        digest = (each.blob_id or "") if lfs is None else lfs.sha256
        files.append(HubFile(each.rfilename, each.size or 0, digest.lower()))
    return HubModel(name, found.sha or "", tuple(files), gguf.get("architecture"))


def cache_of(repo: str) -> Path:
    """Return the folder of a repository in the hub's cache, with its blobs and snapshots; it need not exist."""
    from huggingface_hub import constants  # noqa: PLC0415
    from huggingface_hub.file_download import repo_folder_name  # noqa: PLC0415

    return Path(constants.HF_HUB_CACHE).expanduser() / repo_folder_name(repo_id=repo, repo_type="model")


def cached_folder(repo: str, revision: str | None = None) -> Path | None:
    """Return the snapshot of a revision in the hub's cache; None if it has none. Asks no network."""
    return snapshot_in(cache_of(repo), revision)


def snapshot_in(folder: Path, revision: str | None = None) -> Path | None:
    """Return the snapshot of a revision in the folder of a repository in a cache; None if it has none."""
    ref = folder / "refs" / (revision or "main")
    try:
        commit = ref.read_text(encoding="ascii").strip() if ref.is_file() else revision or ""
    except (OSError, UnicodeDecodeError):
        return None
    found = folder / "snapshots" / commit
    return found if commit and found.is_dir() else None


def from_hub(name: HubName, files: Sequence[str], revision: str | None = None) -> Path:
    """Return the folder or the GGUF file of a name: fetched where the hub has it newer, else what the cache has.

    `files`: patterns of those of a folder. ModelError with what was tried.
    """
    if name.pick is None:
        found = _folder_from_hub(name, files, revision)
        if not any(found.glob("*.json")) and (tags := _tags_on_hub(name.repo, revision)):
            raise needs_pick(name, tags)
        return found
    folder = cached_folder(name.repo, revision)
    if not any(fnmatch("a.safetensors", each) for each in files):  # no weights are wanted, and this file has all in one
        if folder is None:
            raise ModelError(f"{name}: is not in the hub's cache; quire pull {name} fetches it")
        return folder / pick_gguf(name, _files_below(folder))
    try:
        chosen = pick_gguf(name, _names_on_hub(name.repo, revision))
        return Path(snapshot(name.repo, (glob.escape(chosen),), revision, local_files_only=False)) / chosen
    except ModelError:
        raise
    except Exception as error:  # the hub client raises its HTTP library's errors as well
        log.debug("download of %s failed", name, exc_info=True)
        if folder is None:
            raise _not_found(name, revision, error) from error
    return folder / pick_gguf(name, _files_below(folder))


def needs_pick(name: HubName, tags: Sequence[str]) -> ModelError:
    """Return the error for a repository of GGUF files that is named without one of them."""
    return ModelError(f"{name}: has GGUF files: name one, as {name}:{tags[0]}; there are {', '.join(tags)}")


def _tags_on_hub(repo: str, revision: str | None) -> list[str]:
    try:
        return gguf_tags(_names_on_hub(repo, revision))
    except Exception:  # the hub client raises its HTTP library's errors as well
        return []


def _names_on_hub(repo: str, revision: str | None) -> list[str]:
    from huggingface_hub import HfApi  # noqa: PLC0415

    return HfApi().list_repo_files(repo, revision=revision)


def whole_in_cache(name: HubName, revision: str | None = None) -> Path | None:
    """Return the folder or GGUF file of a name in the hub's cache, None where parts are missing; asks no network."""
    folder = cached_folder(name.repo, revision)
    if folder is None:
        return None
    if name.pick is not None:
        tags = gguf_tags(files := _files_below(folder))
        return folder / pick_gguf(name, files) if tags else None
    try:
        found = Path(snapshot(name.repo, HUB_FILES, revision, local_files_only=True))
    except Exception:  # its listing in the cache names files that are missing
        return None
    return found if any(found.glob("*.safetensors")) else None


def _files_below(folder: Path) -> list[str]:
    return sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file())


def _folder_from_hub(name: HubName, files: Sequence[str], revision: str | None) -> Path:
    try:
        return Path(snapshot(name.repo, files, revision, local_files_only=False))
    except Exception as error:  # the hub client raises its HTTP library's errors as well
        log.debug("download of %s failed", name, exc_info=True)
        reason = error
    try:
        return Path(snapshot(name.repo, files, revision, local_files_only=True))  # some proxies hide the cache from it
    except Exception:
        raise _not_found(name, revision, reason) from reason


def _not_found(name: HubName, revision: str | None, reason: Exception) -> ModelError:
    return ModelError(
        f"{name}{at(revision)}: no such local folder; the hub could not give it ({cause(reason)}); and the hub's local "
        "cache does not have it"
    )


def snapshot(repo: str, files: Sequence[str], revision: str | None, *, local_files_only: bool) -> str:
    """Return the folder of a repository in the hub's cache, with its files of some patterns fetched."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    return str(
        snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(files),
            ignore_patterns=HUB_FILES_LEFT_OUT,
            local_files_only=local_files_only,
        )
    )


def at(revision: str | None) -> str:
    """Return a revision as errors name it; nothing for the default branch."""
    return "" if revision is None else f" (revision {revision!r:.100})"


def cause(error: Exception) -> str:
    """Return the first line of an error, or of the one that its hub client wraps, without names of classes."""
    text = (str(error).strip() or "no message").splitlines()[0]
    return re.sub(r"\(?\bGot: \w+(?:Error|Exception|Timeout): (.*?)\)?$", r"\1", text)


def has_digest(path: Path, digest: str) -> bool:
    """Return whether a file has a digest of the hub's: SHA-256 of its bytes, or SHA-1 as git makes it."""
    with path.open("rb") as file:
        if len(digest) == 64:
            return hashlib.file_digest(file, "sha256").hexdigest() == digest
        header = f"blob {path.stat().st_size}\0".encode()
        found = hashlib.sha1(header, usedforsecurity=False)  # git's name of the content, not a proof against forgery
        while piece := file.read(1 << 20):
            found.update(piece)
    return found.hexdigest() == digest
