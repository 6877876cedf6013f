"""Entry points of the distribution: commands, names of arguments and schedulers of packages beside `quire`, by name.

`[project.entry-points]` in pyproject.toml lists them. A package that `quire` must not import is found through them.
"""

from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution
from typing import Any

from quire.core.errors import ConfigError

COMMANDS, ARGUMENT_NAMES, SCHEDULERS = "quire.commands", "quire.argument_names", "quire.schedulers"


@cache
def entry_points(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, in the order of pyproject.toml. ConfigError if there are none."""
    try:
        found = {each.name: each for each in distribution("quire").entry_points if each.group == group}
    except PackageNotFoundError:
        found = {}
    if not found:
        raise ConfigError(
            f"the metadata of this installation have no entry points {group!r}; install it again by `pip install -e .`"
        )
    return found


def load(group: str, name: str) -> Any:  # noqa: ANN401 (what the entry point names)
    """Return the object that an entry point names. ConfigError if there is no such entry point."""
    found = entry_points(group).get(name)
    if found is None:
        raise ConfigError(
            f"the metadata of this installation have no entry point {name!r} in {group!r}; install it again by "
            "`pip install -e .`"
        )
    return found.load()
