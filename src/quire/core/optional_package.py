"""Optional packages: one that is absent becomes an error that names it, where a model or a setting needs it."""

from collections.abc import Iterator
from contextlib import contextmanager

from quire.core.errors import EngineError, ModelError


@contextmanager
def needs_package(message: str, *packages: str, error: type[EngineError] = ModelError) -> Iterator[None]:
    """Raise `error`, "MESSAGE needs the package PACKAGE, ...", if an import inside fails for lack of one of them."""
    try:
        yield
    except ModuleNotFoundError as missing:
        package = next((each for each in packages if f"{missing.name}.".startswith(f"{each}.")), None)
        if package is None:
            raise
        raise error(f"{message} needs the package {package}, which is not in this installation") from missing
