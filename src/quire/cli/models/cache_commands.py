"""`quire list`, `quire show` and `quire rm`: models in the hub's cache, which other programs share.

None of them asks the hub.
"""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from quire.cli.flag_groups import with_flag_groups
from quire.cli.models.pull_command import MODEL, REVISION
from quire.core.errors import ModelError
from quire.core.host_limits import format_bytes
from quire.core.hub import HubName, aliases_file, at, read_aliases, whole_gguf_files, whole_in_cache
from quire.core.optional_package import PLANS
from quire.core.optional_package import load as load_entry_point
from quire.engine.formats import read_source
from quire.engine.options import EngineOptions
from quire.formats.gguf.gguf_source import GGUFSource
from quire.model.config import num_parameters, read_config
from quire.model.quantization import UNQUANTIZED, QuantizationOptions
from quire.model.resolve import locate
from quire.model.source import ModelSource


class CachedModel(NamedTuple):
    """A model in the cache: the name that commands take, its bytes, when it was fetched (seconds), its revision."""

    name: str
    num_bytes: int
    fetched_s: float
    revision: str


def cached_models() -> Iterator[CachedModel]:
    """Yield folders with safetensors, and each GGUF file."""
    from huggingface_hub import scan_cache_dir  # noqa: PLC0415 (0.3 s, which other commands do without)
    from huggingface_hub.errors import CacheNotFound  # noqa: PLC0415

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in sorted((each for each in repos if each.repo_type == "model"), key=lambda each: each.repo_id):
        for found in sorted(repo.revisions, key=lambda each: each.commit_hash):
            sizes = {each.file_path.relative_to(found.snapshot_path).as_posix(): each for each in found.files}
            revision = ", ".join(sorted(found.refs)) or found.commit_hash
            if any(name.endswith(".safetensors") for name in sizes):
                yield CachedModel(repo.repo_id, found.size_on_disk, found.last_modified, revision)
            for tag, name in whole_gguf_files(repo.repo_id, [*sizes]).items():
                file = sizes[name]
                yield CachedModel(f"{repo.repo_id}:{tag}", file.size_on_disk, file.blob_last_modified, revision)


@with_flag_groups
def list_models() -> None:
    """List the models that quire pull has fetched, and the aliases of models.toml."""
    rows = [
        (each.name, format_bytes(each.num_bytes), f"{datetime.fromtimestamp(each.fetched_s, UTC):%F}", each.revision)
        for each in cached_models()
    ]
    aliases = read_aliases()
    if rows:
        _print([("NAME", "SIZE", "FETCHED", "REVISION"), *rows])
    if aliases:
        _print([("ALIAS", "MODEL"), *sorted(aliases.items())])
    elif not rows:
        typer.echo(f"nothing yet: quire pull owner/name fetches a model; names of your own go into {aliases_file()}")


@with_flag_groups
def show(model: Annotated[str, MODEL], revision: Annotated[str | None, REVISION] = None) -> None:
    """Show what a model on this machine is: family, parameters, sizes, and what it takes in memory."""
    path = _on_this_machine(model, revision)
    source = read_source(path)
    spec, found = source.spec, source.quantization(QuantizationOptions())
    plan = load_entry_point(PLANS, "memory")(EngineOptions(model=str(path)))
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    rows = {
        "path": str(path),
        "architecture": _architecture(source),
        "parameters": f"{num_parameters(spec):,}",
        "dtype": source.dtype(),
        "quantization": "none" if found == UNQUANTIZED else str(found),
        "layers": f"{len(spec.layers)}, of width {spec.hidden_size}",
        "vocabulary": f"{spec.vocab_size:,} tokens",
        "longest request": f"{plan.scheduler.max_model_len:,} tokens",
        "files": format_bytes(sum(each.stat().st_size for each in files)),
        "in memory": f"{format_bytes(plan.weight_bytes)}, and {format_bytes(plan.kv_bytes_per_token)} for each token",
    }
    _print(rows.items())


@with_flag_groups
def rm(model: Annotated[str, MODEL], revision: Annotated[str | None, REVISION] = None) -> None:
    """Remove a fetched model from the hub's cache: all its revisions or one, or one GGUF file."""
    name = locate(model)
    if isinstance(name, Path):
        raise ModelError(f"{name}: is a folder or file of yours; quire rm removes what quire pull has fetched")
    num_bytes = _remove_repository(name, revision) if name.pick is None else _remove_file(name, revision)
    typer.echo(f"{name}{at(revision)}: removed, {format_bytes(num_bytes)}")


def _on_this_machine(model: str, revision: str | None) -> Path:
    name = locate(model)
    found = name if isinstance(name, Path) else whole_in_cache(name, revision)
    if found is None:
        raise ModelError(f"{name}{at(revision)}: is not in the hub's cache, or not whole; quire pull {name} fetches it")
    return found


def _remove_repository(name: HubName, revision: str | None) -> int:
    """Remove all revisions of a repository, or one; return the bytes. ModelError if there is none."""
    from huggingface_hub import scan_cache_dir  # noqa: PLC0415
    from huggingface_hub.errors import CacheNotFound  # noqa: PLC0415

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        raise _not_in_cache(name, revision) from None
    commits = [
        found.commit_hash
        for repo in cache.repos
        for found in repo.revisions
        if (repo.repo_type, repo.repo_id) == ("model", name.repo)
        and (revision is None or revision in (found.commit_hash, *found.refs))
    ]
    if not commits:
        raise _not_in_cache(name, revision)
    removal = cache.delete_revisions(*commits)
    removal.execute()
    return removal.expected_freed_size


def _remove_file(name: HubName, revision: str | None) -> int:
    """Remove a GGUF file, and its blob where no other revision links to it; return the bytes."""
    path = whole_in_cache(name, revision)
    if path is None:
        raise _not_in_cache(name, revision)
    blob, num_bytes = path.resolve(), path.stat().st_size
    path.unlink()
    snapshots = next(each for each in path.parents if each.name == "snapshots")
    if not any(each.resolve() == blob for each in snapshots.rglob("*") if each.is_symlink()):
        blob.unlink(missing_ok=True)  # None where the cache has no links, and the file was the content itself
        return num_bytes
    return 0


def _not_in_cache(name: HubName, revision: str | None) -> ModelError:
    return ModelError(f"{name}{at(revision)}: is not in the hub's cache")


def _architecture(source: ModelSource) -> str:
    """Return what config.json names, or stands for the architecture of a GGUF file."""
    config = source.config if isinstance(source, GGUFSource) else read_config(source.path)
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else str(config.get("model_type", "unknown"))


def _print(rows: Iterable[tuple[str, ...]]) -> None:
    """Print rows in columns, each as wide as its longest text; none is cut, in a terminal or a pipe."""
    rows = [*rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        typer.echo("   ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
