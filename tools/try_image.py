"""The image's root without docker: a folder with Python, the wheel and the libraries that they load, served by chroot.

    python tools/try_image.py dist/quire-*.whl     # as root

The folder has what the second stage of Dockerfile adds to its base, and of the base what that needs: no shell, no
compiler, no package manager. Its processes have an account of their own (1000). Prints the megabytes of each part; the
exit status is 0 when a completion was answered and the server ended by itself.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from try_wheel import ROOT, ask_server, fitting, say

BASE_MB = 130.0  # python:3.11-slim, unpacked, as its registry has it
ACCOUNT = "1000:1000"
NOT_COPIED = shutil.ignore_patterns("test", "tests", "idlelib", "tkinter", "ensurepip", "__pycache__", "site-packages")


def main() -> None:
    """Build the folder from the wheel for this Python, and serve from it."""
    if os.geteuid() != 0:
        raise SystemExit("chroot needs root")
    wheel = fitting([Path(name) for name in sys.argv[1:]])
    with tempfile.TemporaryDirectory(prefix="quire-image-") as folder:
        root = Path(folder) / "root"
        python = copy_python(root)
        site = install(wheel, root)
        copy_libraries(root, [python, *python.parents[1].rglob("*.so"), *root.rglob("*.so*")])
        for name in ("proc", "dev", "tmp"):
            (root / name).mkdir()
        (root / "tmp").chmod(0o1777)
        parts = {"packages": size_mb(site), "Python, libraries": size_mb(root) - size_mb(site)}
        say("folder", ", ".join(f"{name} {number:.0f} MB" for name, number in parts.items()))
        say("image", f"{BASE_MB:.0f} MB of its base + {parts['packages']:.0f} = {BASE_MB + parts['packages']:.0f} MB")
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}  # mount and chroot
        say("quire serve", ask_server([*isolating(root), str(python), "-m", "quire"], environment))


def copy_python(root: Path) -> Path:
    """Copy the interpreter and its library to where they are outside; return the interpreter's path."""
    python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = Path(sys.base_prefix) / "lib" / python.name
    shutil.copytree(library, under(root, library), ignore=NOT_COPIED)
    copy(root, python)
    return python


def install(wheel: Path, root: Path) -> Path:
    """Install the wheel beside that Python, as the second stage does; return the folder of packages."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-compile"]
    options = ["--ignore-installed", "--only-binary", ":all:", "-c", ROOT / "constraints.txt"]
    site = under(root, Path(sys.base_prefix) / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}")
    subprocess.run([*pip, *options, "--target", site / "site-packages", wheel], check=True)
    return site / "site-packages"


def copy_libraries(root: Path, programs: Iterable[Path]) -> None:
    """Copy the shared libraries that programs load, as `ldd` finds them outside."""
    for program in programs:
        listed = subprocess.run(["ldd", program], check=False, capture_output=True, text=True).stdout
        for found in re.finditer(r"(/\S+)\s+\(0x", listed):
            if not under(root, Path(found[1])).exists() and not found[1].startswith(str(root)):
                copy(root, Path(found[1]))


def isolating(root: Path) -> list[str]:
    """Return the words before a command that runs it in the folder, with devices and /proc as a container has them."""
    mounts = f"mount -t proc proc {root}/proc && mount --bind /dev {root}/dev"
    script = f'{mounts} && exec chroot --userspec={ACCOUNT} {root} "$@"'  # one process, which gets our signals
    return ["/usr/bin/unshare", "--mount", "/bin/sh", "-c", script, "-"]


def under(root: Path, path: Path) -> Path:
    """Return where a path of the outside is in the folder."""
    return root / path.relative_to("/")


def copy(root: Path, path: Path) -> None:
    """Copy a file, and what a link leads to, to its path in the folder."""
    under(root, path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path.resolve(), under(root, path))


def size_mb(folder: Path) -> float:
    """Return the megabytes of the files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


if __name__ == "__main__":
    main()
