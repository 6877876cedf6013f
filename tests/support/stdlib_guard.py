"""Guard that keeps tests from replacing a name of the standard library.

Such a name is shared by the whole process: a replaced `asyncio.sleep` also reaches every other task, thread and
library, so whether a test passes depends on what else runs. The code under test takes the dependency as a parameter
instead, or imports it under a name of its own module, which the test replaces. The standard streams are exempt: they
are made to be replaced.
"""

import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

_REPLACEABLE = frozenset({("sys", "stdin"), ("sys", "stdout"), ("sys", "stderr")})


class StdlibReplacedError(AssertionError):
    """A test replaces a name that the whole process shares."""


def turn_on() -> None:
    """Make `monkeypatch.setattr` and `delattr` refuse the modules and classes of the standard library."""
    for method in ("setattr", "delattr"):
        setattr(pytest.MonkeyPatch, method, _guarded(getattr(pytest.MonkeyPatch, method)))


def _guarded(replace: Callable[..., None]) -> Callable[..., None]:
    def guarded(patch: pytest.MonkeyPatch, target: object, *arguments: object, **options: object) -> None:
        check(target, *arguments[:1])
        replace(patch, target, *arguments, **options)

    return guarded


def check(target: object, name: object = None) -> None:
    """Raise StdlibReplacedError if `target`, an owner or a dotted name with the attribute at its end, is shared."""
    if isinstance(target, str):
        path, _, name = target.rpartition(".")
        target = pkgutil.resolve_name(path)
    module = ""
    if isinstance(target, ModuleType | type):
        module = target.__name__ if isinstance(target, ModuleType) else target.__module__
    if module.partition(".")[0] in sys.stdlib_module_names and (module, name) not in _REPLACEABLE:
        raise StdlibReplacedError(
            f"{module}: {name} of the standard library is shared by the whole process: "
            f"pass the replacement to the code under test, or replace a name of its own module"
        )
