"""Defaults of flags, none of which leads out of the installation or the folder of the call; the list of commands."""

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from quire.cli.main import SUMMARIES, make_app


def commands(command: TyperCommand | TyperGroup, name: str) -> Iterator[tuple[str, TyperCommand]]:
    if isinstance(command, TyperGroup):
        for below, each in command.commands.items():
            yield from commands(each, f"{name} {below}")  # type: ignore[arg-type]
    else:
        yield name, command


COMMANDS = dict(commands(get_command(make_app()), "quire"))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", COMMANDS)
def test_no_default_leads_out_of_the_checkout(name: str) -> None:
    for parameter in COMMANDS[name].params:
        shown = getattr(parameter, "show_default", None)
        told = [parameter.default, shown, getattr(parameter, "help", None)]
        assert not any(".." in Path(text).parts for text in map(str, told) if "/" in text), parameter.name


def test_only_commands_whose_answers_are_read_as_they_come_bound_the_time_of_steps() -> None:
    found = {name: option.default for name, each in COMMANDS.items() for option in each.params
             if option.name == "itl_target_ms"}  # fmt: skip
    batches = {"quire generate", "quire run-batch", "quire session warm"}
    assert {name for name, default in found.items() if default == "none"} == batches
    assert found["quire serve"] == found["quire deploy"] == found["quire chat"] == "500"


def test_the_list_says_what_commands_say_themselves() -> None:
    made = get_command(make_app()).commands  # type: ignore[attr-defined]
    said = {name: inspect.cleandoc(command.help).partition("\n\n")[0] for name, command in made.items()}
    assert {name: " ".join(text.split()) for name, text in said.items()} == SUMMARIES
