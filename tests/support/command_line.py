"""The command line, run in this process as its entry point does."""

import io
import os
from collections.abc import Callable
from typing import NamedTuple

import pytest

from quire.cli.main import main


class Ran(NamedTuple):
    """How a command ended."""

    code: int | str | None
    out: str
    err: str


Run = Callable[..., Ran]


class Terminal(io.StringIO):
    """Standard input on which a person has not typed anything."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_quire_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs `quire` with arguments, and with text or a terminal on standard input."""

    def run_quire(*arguments: object, stdin: str | None = None) -> Ran:
        monkeypatch.setattr("sys.stdin", Terminal() if stdin is None else io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(ended.value.code, captured.out, captured.err)

    return run_quire
