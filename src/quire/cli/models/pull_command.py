"""`quire pull`: a model of a hub into the hub's cache, checked before its weights are fetched and after.

Before: its family is served, it fits this machine's memory by the arithmetic of `quire plan`, and the disk has room.
After: each file has the digest that the hub gives for it.

The hub's client resumes a broken transfer within one call, and forgets the part of a file when the call ends (2.4).
Files in LFS, gigabytes, are therefore fetched here by its `http_get` into files with names of their own beside its
blobs, and become blobs when they are whole and their digest is right; the client makes a snapshot of them.
"""

import fcntl
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from glob import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.flag_groups import flag, with_flag_groups
from quire.core.errors import ConfigError, EngineError, ModelError
from quire.core.host_limits import format_bytes, free_memory_bytes
from quire.core.hub import (
    HUB_FILES,
    HubFile,
    HubModel,
    HubName,
    at,
    cache_of,
    cause,
    find_on_hub,
    from_hub,
    gguf_tags,
    has_digest,
    is_offline,
    needs_pick,
    snapshot,
    whole_in_cache,
)
from quire.core.optional_package import PLANS
from quire.core.optional_package import load as load_entry_point
from quire.engine.options import EngineOptions
from quire.model.config import UnknownArchitectureError
from quire.model.resolve import locate

MODEL = typer.Argument(
    help="owner/name, owner/name:Q4_K_M for a GGUF file, a folder, or a name of models.toml", metavar="MODEL"
)
REVISION = flag("branch, tag or commit of a hub id", metavar="NAME", show_default="the default branch")
SHA256_DIGITS = 64
ANYWAY = flag("fetch it although it does not fit this machine, or is not served", "--anyway")


@with_flag_groups
def pull(
    model: Annotated[str, MODEL],
    revision: Annotated[str | None, REVISION] = None,
    anyway: Annotated[bool, ANYWAY] = False,
) -> None:
    """Fetch a model of a hub, after a check that it is served and fits; a broken transfer is resumed."""
    path = fetch(model, revision, anyway=anyway)
    typer.echo(path)


def fetch_missing(engine: EngineOptions) -> None:
    """Fetch the model of a hub of which the cache has no whole copy, as `fetch`, for an engine with these options.

    A model that is not found is left to the engine, which tells all that it has tried.
    """
    if engine.model is None or engine.load_format == "dummy":
        return
    name = locate(engine.model)
    if isinstance(name, Path) or is_offline() or whole_in_cache(name, engine.revision) is not None:
        return
    try:
        remote = find_on_hub(name, engine.revision)
    except ModelError:
        return
    _fetch_checked(remote, engine.revision, engine)


def fetch(model: str, revision: str | None = None, *, anyway: bool = False) -> Path:
    """Return the folder or GGUF file of a model, fetched where it has to be; progress is told on stderr.

    Raises ModelError or ConfigError before any byte of weights is fetched for a model that is not served or does not
    fit memory (unless `anyway`) or disk, and afterwards for files without the hub's digests, which are removed.
    """
    name = locate(model)
    if isinstance(name, Path):
        _tell(f"{name}: is on this machine")
        return name
    if is_offline():
        return _offline(name, revision)
    return _fetch_checked(find_on_hub(name, revision), revision, None if anyway else EngineOptions())


def _fetch_checked(remote: HubModel, revision: str | None, engine: EngineOptions | None) -> Path:
    """Return the model, once it is fetched. `engine`: options with which it is to be served and to fit; None: any."""
    name, files = remote.name, _wanted(remote)
    if engine is not None:
        _check_served(remote, files, revision, engine)
    _check_disk(remote, files)
    _tell(f"{name}: {len(files)} files, {format_bytes(sum(each.num_bytes for each in files))}")
    try:
        with _progress_bars(shown=sys.stderr.isatty()):
            checked = {each for each in files if _is_large(each) and _fetch_large(remote, each)}
        with _progress_bars(shown=False):
            folder = Path(snapshot(name.repo, [escape(each.name) for each in files], revision, local_files_only=False))
    except ModelError:
        raise
    except Exception as error:  # the hub client raises its HTTP library's errors as well
        told = "what was fetched is kept, and the same command goes on from there"
        raise ModelError(f"{name}{at(revision)}: the transfer broke ({cause(error)}); {told}") from error
    _check_digests(remote, [each for each in files if each not in checked], folder)
    return folder if name.pick is None else folder / files[0].name


def _is_large(file: HubFile) -> bool:
    return len(file.digest) == SHA256_DIGITS


def _fetch_large(remote: HubModel, file: HubFile) -> bool:
    """Fetch a file in LFS into the cache's blobs, from where an earlier call broke; return False if it was there.

    ModelError for one with another digest, which is removed, or one that another process fetches.
    """
    from huggingface_hub import hf_hub_url  # noqa: PLC0415 (0.3 s, which other commands do without)
    from huggingface_hub.file_download import http_get  # noqa: PLC0415
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # noqa: PLC0415

    blob, partial = _blob(remote, file), _partial(remote, file)
    if blob.exists():
        return False
    partial.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("ab") as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelError(f"{remote.name}: {file.name}: another process fetches it now") from None
        http_get(
            hf_hub_url(remote.name.repo, file.name, revision=remote.commit), out, resume_size=out.tell(),
            headers=build_hf_headers(), expected_size=file.num_bytes, displayed_filename=file.name,
        )  # fmt: skip
        out.flush()
        if not has_digest(partial, file.digest):
            partial.unlink()
            raise _wrong_digests(remote, [file.name])
        partial.replace(blob)
    return True


def _blob(remote: HubModel, file: HubFile) -> Path:
    return cache_of(remote.name.repo) / "blobs" / file.digest


def _partial(remote: HubModel, file: HubFile) -> Path:
    return cache_of(remote.name.repo) / "blobs" / f"{file.digest}.quire-part"


def _offline(name: HubName, revision: str | None) -> Path:
    try:
        found = from_hub(name, HUB_FILES, revision)
    except ModelError:
        told = "HF_HUB_OFFLINE is set, so the hub is not asked, and its cache has no whole copy"
        raise ModelError(f"{name}{at(revision)}: {told}") from None
    _tell(f"{name}: HF_HUB_OFFLINE is set, so the hub is not asked; its cache has a whole copy")
    return found


def _wanted(remote: HubModel) -> list[HubFile]:
    """Return the files that are read of a model. ModelError for a repository without weights that are."""
    files, name = remote.wanted(HUB_FILES), remote.name
    if name.pick is not None or any(each.name.endswith(".safetensors") for each in files):
        return files
    if tags := gguf_tags(each.name for each in remote.files):
        raise needs_pick(name, tags)
    raise ModelError(f"{name}: has no weights in safetensors or GGUF; files of pickles (*.bin, *.pt) are not read")


def _check_served(remote: HubModel, files: list[HubFile], revision: str | None, engine: EngineOptions) -> None:
    """Raise ModelError for a family that is not served, ConfigError for a model that does not fit the memory."""
    if remote.name.pick is not None:
        _check_gguf(remote, files[0])
        return
    with _progress_bars(shown=False):
        folder = Path(snapshot(remote.name.repo, ("*.json",), revision, local_files_only=False))
    try:
        plan = load_entry_point(PLANS, "memory")(replace(engine, model=str(folder), revision=None))
    except UnknownArchitectureError as error:
        if engine.model is not None and engine.model_impl != "quire" and find_spec("transformers") is not None:
            return      # the engine looks whether transformers has it
        raise _refused(remote, error, folder) from error
    except EngineError as error:
        if isinstance(error, ConfigError) and engine.device == "cuda":
            return      # its memory is not that of this plan
        raise _refused(remote, error, folder) from error
    longest = f"requests of up to {plan.scheduler.max_model_len:,} tokens"
    _tell(f"{remote.name}: {plan.num_parameters:,} parameters, {format_bytes(plan.weight_bytes)} in memory, {longest}")


def _refused(remote: HubModel, error: EngineError, folder: Path) -> EngineError:
    return type(error)(str(error).replace(str(folder), str(remote.name)) + _anyway(remote))


def _anyway(remote: HubModel) -> str:
    return f" (quire pull {remote.name} --anyway fetches it all the same)"


def _check_gguf(remote: HubModel, file: HubFile) -> None:
    from quire.formats.gguf.gguf_config import ARCHITECTURES  # noqa: PLC0415 (for such files alone)

    architecture, free_bytes = remote.gguf_architecture, free_memory_bytes()
    if architecture is not None and architecture not in ARCHITECTURES:
        raise ModelError(
            f"{remote.name}: architecture {architecture!r:.80} of GGUF is not served; known are "
            f"{', '.join(ARCHITECTURES)}{_anyway(remote)}"
        )
    if file.num_bytes > free_bytes:
        raise ConfigError(
            f"{remote.name} does not fit: weights of {file.num_bytes} bytes, and {free_bytes} bytes of memory are free"
            f"{_anyway(remote)}"
        )


def _check_disk(remote: HubModel, files: list[HubFile]) -> None:
    """Raise ConfigError where the cache's disk has no room for what is not there yet."""
    folder = cache_of(remote.name.repo)
    missing = [each for each in files if not _blob(remote, each).exists()]
    parts = [part for each in missing if (part := _partial(remote, each)).is_file()]
    num_bytes = sum(each.num_bytes for each in missing) - sum(each.stat().st_size for each in parts)
    free_bytes = shutil.disk_usage(next(each for each in folder.parents if each.exists())).free
    if num_bytes > free_bytes:
        told = f"{num_bytes} bytes are to be fetched, and {free_bytes} are free in {folder.parent}"
        raise ConfigError(f"{remote.name}: {told}")


def _check_digests(remote: HubModel, files: list[HubFile], folder: Path) -> None:
    """Remove files that have not the hub's digests, and raise ModelError that names them."""
    if folder.name != remote.commit:
        raise ModelError(f"{remote.name}: the repository was changed while it was fetched; pull it again")
    wrong = [each.name for each in files if each.digest and not has_digest(folder / each.name, each.digest)]
    for name in wrong:
        (folder / name).resolve().unlink()  # the blob, to which the snapshot links
        (folder / name).unlink(missing_ok=True)
    if wrong:
        raise _wrong_digests(remote, wrong)
    num_unknown = sum(not each.digest for each in files)
    if num_unknown:
        _tell(f"{remote.name}: the hub has no digests of {num_unknown} files, which are not checked")


@contextmanager
def _progress_bars(*, shown: bool) -> Iterator[None]:
    """Show the client's progress bars or not, unless HF_HUB_DISABLE_PROGRESS_BARS decides."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # noqa: PLC0415
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _wrong_digests(remote: HubModel, files: list[str]) -> ModelError:
    told = f"{', '.join(files)}: content and digest differ, so what was fetched is removed; pull it again"
    return ModelError(f"{remote.name}: {told}")


def _tell(text: str) -> None:
    typer.echo(text, err=True)
