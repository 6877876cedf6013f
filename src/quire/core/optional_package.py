"""Libraries that are optional at run time: the error that names the one that a setting needs, and how to install it."""

from collections.abc import Iterator
from contextlib import contextmanager

from quire.core.errors import ConfigError


@contextmanager
def needs_library(setting: str, library: str, requirement: str) -> Iterator[None]:
    """Raise ConfigError "SETTING needs the package LIBRARY: pip install REQUIREMENT" if it is missing for an import."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != library:
            raise
        raise ConfigError(f"{setting} needs the package {library}: pip install {requirement}") from None
