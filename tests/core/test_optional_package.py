"""Packages beside `quire`, found by the entry points of the distribution; the error where there are none."""

import subprocess
import sys

import pytest

from quire.core.errors import ConfigError
from quire.core.optional_package import ARGUMENT_NAMES, COMMANDS, SCHEDULERS, entry_points, load

ABSENT = """
from importlib.metadata import PackageNotFoundError
from quire.core import optional_package as entry_points

def none_there(name):
    raise PackageNotFoundError(name)

entry_points.distribution = none_there
from quire.cli.main import main
main(["plan"])
"""


@pytest.mark.parametrize("group", [COMMANDS, ARGUMENT_NAMES, SCHEDULERS])
def test_each_entry_point_names_something(group: str) -> None:
    assert all(callable(load(group, name)) for name in entry_points(group))


def test_commands_are_in_the_order_of_the_help() -> None:
    assert [*entry_points(COMMANDS)][:5] == ["serve", "generate", "chat", "run", "pull"]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no entry point 'orbit' in 'quire\.schedulers'"):
        load(SCHEDULERS, "orbit")


def test_a_command_without_metadata_tells_what_is_missing() -> None:
    ran = subprocess.run([sys.executable, "-c", ABSENT], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "the metadata of this installation have no entry points 'quire.commands'" in ran.stderr
    assert "Traceback" not in ran.stderr
