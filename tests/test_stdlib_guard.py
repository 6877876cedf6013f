"""Tests do not replace what the whole process shares, and the guard that keeps them from it works."""

import ast
import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.server import lifecycle
from support.stdlib_guard import StdlibReplacedError

TESTS = Path(__file__).parent
PATCHES = frozenset({"patch", "patch.object", "mock.patch", "mock.patch.object"})
SET = ("setattr", True)


@pytest.mark.parametrize(
    "target",
    [
        (asyncio, "sleep"),
        (lifecycle.asyncio, "sleep"),
        (socket.socket, "connect"),
        (subprocess, "Popen"),
        (sys, "executable"),
        ("quire.server.lifecycle.asyncio.sleep",),
        ("importlib.util.find_spec",),
    ],
    ids=str,
)
def test_name_that_the_process_shares_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch, target: tuple[object, ...]
) -> None:
    with pytest.raises(StdlibReplacedError, match="shared by the whole process"):
        monkeypatch.setattr(*target, None)  # type: ignore[call-overload]
    with pytest.raises(StdlibReplacedError, match="shared by the whole process"):
        monkeypatch.delattr(*target)  # type: ignore[call-overload]
    assert asyncio.sleep is lifecycle.asyncio.sleep is not None


def test_names_of_our_modules_and_the_standard_streams_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.stdin, lifecycle.FIRST_PAUSE_S
    monkeypatch.setattr(lifecycle, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr("quire.server.lifecycle.asyncio", None)
    monkeypatch.setattr("sys.stdin", None)
    assert (sys.stdin, lifecycle.FIRST_PAUSE_S, lifecycle.asyncio) == (None, 0.0, None)
    monkeypatch.undo()
    assert before == (sys.stdin, lifecycle.FIRST_PAUSE_S)


def test_nothing_goes_around_the_guard() -> None:
    """Neither an assignment to a module of the standard library nor `unittest.mock.patch`, which the guard misses."""
    found = {path: ways_around(path.read_text(encoding="utf-8")) for path in TESTS.rglob("*.py")}
    assert {path: ways for path, ways in found.items() if ways} == {}


def test_ways_around_the_guard_are_found() -> None:
    lines = "import time", "time.sleep = None", "mock.patch('a')", "setattr(time, 'sleep', None)", "setattr(x, 'a', 1)"
    assert ways_around("\n".join(lines)) == ["line 2: time.sleep", "line 3: mock.patch('a')", "line 4: setattr(time)"]


def ways_around(source: str) -> list[str]:
    """Return what a test does past the guard, by line."""
    tree = ast.parse(source)
    modules = {name for name in _imported(tree) if name.partition(".")[0] in sys.stdlib_module_names}
    found = [f"line {line}: {name}" for line, name in _assigned(tree) if name.rpartition(".")[0] in modules]
    for line, name, first in _calls(tree):
        if name in PATCHES or (name, first in modules) == SET:
            found.append(f"line {line}: {name}({first})")
    return found


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.asname is None)


def _assigned(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node.lineno, ast.unparse(node)


def _calls(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the function and the first argument of each call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func), ast.unparse(node.args[0]) if node.args else ""
