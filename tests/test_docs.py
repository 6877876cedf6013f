"""Code blocks of README and docs: each is run as a reader finds it, or says why it is not (support/doc_blocks.py).

`make test` runs Python, each block alone, in this process beside one forked server. `make docs` runs everything in the
order of the page, each command a process of its own. A reader has the checkout's files with nothing beside them, the
demo model as MODEL (of `make serve`, too), a GGUF file of it and two adapters. Port 8000 is replaced by a free one, and
a page that talks to a server before it starts one finds that of `quire serve`. A command that serves replaces the
server before it.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.cli.main import main
from support.doc_blocks import PAGES, ROOT, Block, Command, blocks_of, commands_of, printed_as
from support.gguf_files import convert
from support.nodes import free_port
from support.peft_folders import write_adapter
from support.server import ServerProcess, running_server

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.kind == "python" and block.reason is None]
CHECKOUT = ("bench", "constraints.txt", "docs", "Makefile", "pyproject.toml", "README.md", "src", "tests", "tools")
SERVES = ("quire serve", "make serve")
ADDRESS, PORT = "http://127.0.0.1:8000", ":8000"
TYPED = {"quire chat": "Write a function add.\n/exit\n"}
LIMIT_S = 1200.0  # against hangs


def place(block: Block) -> str:
    return block.place


@pytest.fixture(scope="module")
def reader_folder(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    """Return a folder with the files of a checkout, and what the pages have names for."""
    folder = tmp_path_factory.mktemp("reader") / "quire"
    folder.mkdir()
    for name in CHECKOUT:
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").mkdir()
    (folder / ".venv/bin").symlink_to(Path(sys.executable).parent)
    (folder / ".venv/.set-up-to-run").touch()  # newer than the files that it is made from
    for name in ("MODEL", "model"):
        (folder / name).symlink_to(demo_model)
    convert(demo_model, folder / "MODEL.gguf")
    for seed, name in enumerate(("sql", "chat")):
        write_adapter(folder / "adapters" / name, demo_model, seed)
    return folder


@pytest.mark.parametrize("block", BLOCKS, ids=place)
def test_block_is_run_or_says_why_not(block: Block) -> None:
    assert block.reason is not None or block.kind is not None, "neither Python nor commands, and no reason"
    if block.reason is None and block.kind == "commands":
        assert list(commands_of(block))


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.is_session], ids=place)
def test_session_prints_what_the_page_says(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands_of(block):
        name, *arguments = shlex.split(command.text)
        assert name == "quire"
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
        printed = capsys.readouterr().out
        assert command.output is not None
        assert printed_as(command.output, printed), printed


@pytest.fixture(scope="module")
def server(demo_model: Path) -> Iterator[ServerProcess]:
    with running_server("--runner", "pooling") as running:
        yield running


@pytest.mark.parametrize("block", PYTHON, ids=place)
def test_python_runs_alone(
    block: Block, reader_folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(reader_folder)
    text = block.text
    if ADDRESS in text:
        text = text.replace(ADDRESS, request.getfixturevalue("server").url)
    values: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, block.place, "exec"), values)
    for name in ("llm", "client"):
        if name in values:
            values[name].close()


@pytest.mark.docs
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_runs_in_its_order(page: Path, reader_folder: Path, tmp_path: Path) -> None:
    reader = Reader(reader_folder, tmp_path)
    try:
        for block in blocks_of(page):
            if block.reason is None:
                reader.run(block)
    finally:
        reader.stop_server()


class Reader:
    """A reader of one page at a shell: processes in the folder, with one server at a time."""

    def __init__(self, folder: Path, home: Path) -> None:
        self._folder, self._log = folder, home / "server.log"
        self._server: subprocess.Popen[bytes] | None = None
        self._port = free_port()
        (home / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("QUIRE_", "PYTHONPATH"))}
        self._environment = kept | {
            "HOME": str(home), "LC_ALL": "C.UTF-8", "COLUMNS": "80", "OMP_NUM_THREADS": "1", "MODEL": "demo",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip

    def run(self, block: Block) -> None:
        """Run a block. Fails with what it has printed if it fails."""
        if PORT in block.text and self._server is None and not block.text.startswith(SERVES):
            self._serve("quire serve")
        if block.kind == "python":
            self._finish(block.place, [sys.executable, "-c", block.text.replace(PORT, f":{self._port}")])
            return
        for command in commands_of(block):
            if command.text.startswith(SERVES):
                self._serve(command.text)
            else:
                self._type(block.place, command)

    def _type(self, where: str, command: Command) -> None:
        text = command.text
        typed = next((typed for name, typed in TYPED.items() if text.startswith(name)), "")
        url = {}
        if text.startswith(("quire bench serve", "quire top")) and "--url" not in text:
            url = {"QUIRE_URL": f"http://127.0.0.1:{self._port}"}
        printed = self._finish(where, ["bash", "-c", text.replace(PORT, f":{self._port}")], typed, url)
        if command.output is not None:
            assert printed_as(command.output, printed), f"{where}: {text} prints\n{printed}"

    def _finish(self, where: str, command: list[str], typed: str = "", url: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            command, input=typed, capture_output=True, text=True, check=False, cwd=self._folder, timeout=LIMIT_S,
            env=self._environment | (url or {}),
        )  # fmt: skip
        said = done.stdout + done.stderr + (self._log.read_text() if self._log.exists() else "")
        assert done.returncode == 0, f"{where}: {command[-1]} ends with {done.returncode}:\n{said}"
        return done.stdout

    def _serve(self, text: str) -> None:
        """Start a server in place of the one before, and wait until it answers."""
        self.stop_server()
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                ["bash", "-c", f"exec {text}"], cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=self._environment | {"QUIRE_PORT": str(self._port)}, start_new_session=True,
            )  # fmt: skip
        deadline_s = time.monotonic() + LIMIT_S
        while True:
            assert self._server.poll() is None, f"{text} ends with {self._server.returncode}:\n{self._log.read_text()}"
            assert time.monotonic() < deadline_s, f"{text} is not ready:\n{self._log.read_text()}"
            with suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{self._port}/health").status_code == httpx.codes.OK:
                    return
            time.sleep(0.05)

    def stop_server(self) -> None:
        """End the server, if there is one, with all its processes."""
        if self._server is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGTERM)
            self._server.wait(60)
            self._server = None
