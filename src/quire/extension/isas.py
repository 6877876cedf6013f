"""Instruction sets and threads of the C++ extension, which may not have been built."""

import importlib.util
from functools import cache

from quire.core.host_limits import num_threads


@cache
def usable_isas() -> tuple[str, ...]:
    """Return the instruction sets that were built and that this CPU has, the best first; none without the extension."""
    if importlib.util.find_spec("quire.extension._kernels") is None:
        return ()
    from quire.extension import _kernels  # noqa: PLC0415 (the extension is optional)

    _kernels.set_num_threads(num_threads())
    return tuple(_kernels.usable_isas())


def threads_of_kernels() -> int:
    """Return how many threads compute: a rank has its share of those of its process's machine."""
    if not usable_isas():
        return num_threads()
    from quire.extension import _kernels  # noqa: PLC0415 (the extension is optional)

    return _kernels.num_threads()


def set_threads_of_kernels(count: int) -> None:
    """Set how many threads compute in this process; without the extension there is nothing to set."""
    if usable_isas():  # the first call sets the number, too
        from quire.extension import _kernels  # noqa: PLC0415 (the extension is optional)

        _kernels.set_num_threads(count)
