"""Faults, injected by replacing one method of the code under test with a function that raises."""

from collections.abc import Callable
from typing import NoReturn


def raising(fault: type[BaseException]) -> Callable[..., NoReturn]:
    """Return a function of any arguments that raises `fault`."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise fault

    return fail
