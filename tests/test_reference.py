"""docs/reference.md and the code name the same public things."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import quire
from quire.cli.main import make_app
from quire.core import errors
from reference_tables import PAGE

REFERENCE = PAGE.path.read_text(encoding="utf-8")
CODE = re.findall(r"`[^`\n]+`|^    .*$", REFERENCE, flags=re.MULTILINE)  # spans, and lines of blocks
NAMED = {word for code in CODE for word in re.findall(r"\w+", code)}


def public_names(owner: object) -> set[str]:
    """Names that a user may write after a dot: fields, properties and methods."""
    names = {name for name in vars(owner) if not name.startswith("_")}
    return names | ({field.name for field in fields(owner)} if is_dataclass(owner) else set())


def flags_of(command: TyperCommand | TyperGroup) -> Iterator[str]:
    """Yield the long options of a command and of those below it."""
    for parameter in command.params:
        yield from (name for name in [*parameter.opts, *parameter.secondary_opts] if name.startswith("--"))
    for below in getattr(command, "commands", {}).values():
        yield from flags_of(below)


@pytest.mark.parametrize("name", quire.__all__)
def test_every_public_name_is_explained_with_all_its_parts(name: str) -> None:
    assert f"quire.{name}" in REFERENCE
    public = getattr(quire, name)
    if inspect.isclass(public):
        assert public_names(public) <= NAMED
        assert set(inspect.signature(public).parameters) <= NAMED


def test_every_error_is_explained() -> None:
    assert {name for name, value in vars(errors).items() if inspect.isclass(value)} <= NAMED


def test_flags_explained_are_the_flags_that_there_are() -> None:
    explained = set(re.findall(r"--[a-z][a-z0-9-]*", REFERENCE))
    assert explained == {*flags_of(get_command(make_app())), "--help"}


def test_tables_of_options_are_those_of_the_declarations() -> None:
    written = set(re.findall(r"<!-- options: (\w+) -->", REFERENCE))
    assert written == PAGE.tables.keys()
    assert PAGE.filled(REFERENCE) == REFERENCE, "run python tools/reference_tables.py"
