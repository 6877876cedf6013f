"""Packages that may not be installed: libraries that a setting needs, and packages that bring commands and names."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution
from typing import Any

from quire.core.errors import ConfigError, NotInstalledError

# Groups of `[project.entry-points]` in pyproject.toml: packages beside `quire`, which it must not import.
COMMANDS, ARGUMENT_NAMES, SCHEDULERS = "quire.commands", "quire.argument_names", "quire.schedulers"
PLANS = "quire.plans"

NEEDS_TORCH = "this needs PyTorch: pip install 'quire[torch]'"
NEEDS_KERNELS = "the C++ kernels were not built; install a wheel, or again where there is a C++ compiler"


@contextmanager
def needs_library(setting: str, library: str, requirement: str) -> Iterator[None]:
    """Raise NotInstalledError "SETTING needs the package LIBRARY: pip install REQUIREMENT" if an import misses it."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != library:
            raise
        raise NotInstalledError(f"{setting} needs the package {library}: pip install {requirement}") from None


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
