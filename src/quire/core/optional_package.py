"""Optional packages: one that is absent becomes an error that names it, where a model needs it."""

from collections.abc import Iterator
from contextlib import contextmanager

from quire.core.errors import ModelError


@contextmanager
def needs_package(package: str, message: str) -> Iterator[None]:
    """Raise ModelError, "MESSAGE needs the package PACKAGE, ...", if an import inside fails for lack of the package."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not f"{error.name}.".startswith(f"{package}."):
            raise
        raise ModelError(f"{message} needs the package {package}, which is not in this installation") from error
