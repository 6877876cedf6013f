"""Optional packages: an import that fails for lack of one, and the error that names it where something needs it."""

from collections.abc import Iterator
from contextlib import contextmanager

from quire.core.errors import EngineError, ModelError


def absent_package(missing: ModuleNotFoundError, *packages: str) -> str | None:
    """Return which of some packages an import has failed for lack of; None: of something else, which is a fault."""
    return next((each for each in packages if f"{missing.name}.".startswith(f"{each}.")), None)


@contextmanager
def needs_package(message: str, *packages: str, error: type[EngineError] = ModelError) -> Iterator[None]:
    """Raise `error`, "MESSAGE needs the package PACKAGE, ...", if an import inside fails for lack of one of them."""
    try:
        yield
    except ModuleNotFoundError as missing:
        package = absent_package(missing, *packages)
        if package is None:
            raise
        raise error(f"{message} needs the package {package}, which is not in this installation") from missing
