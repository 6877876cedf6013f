"""Snapshot of a replay between two steps: what a file of a record begins with, if another one came before it.

It is a pickle of the scheduler and its cache, in which tokens, salts and clients are sealed already. A file may come
from anywhere, so only the classes of schedulers, caches and their plain data are made from one, and no function is
called but those of this module.
"""

import io
import pickle
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from itertools import count
from types import FunctionType, GenericAlias, MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.core.step_times import StepWork

if TYPE_CHECKING:
    from quire.engine.recording.replay import Replay

_PACKAGES = ("quire.scheduling.", "quire.cache.")
_MODULES = frozenset(
    f"quire.core.{name}" for name in (
        "config", "deltas", "logprob_table", "plan", "pooling", "sampling_params", "sequence", "step_times",
        "structured_outputs", "token_ids",
    )
)  # fmt: skip
_CLASSES: dict[tuple[str, str], type] = {
    (each.__module__, each.__name__): each
    for each in (array, Counter, OrderedDict, defaultdict, deque, count, set, frozenset, list, dict)
}
_REPLAY = "replay"      # the persistent id of what is restored into


def snapshot(replay: "Replay", state: object) -> bytes:
    """Return a state that refers to a replay's parts, as `restore` reads it."""
    written = io.BytesIO()
    _Pickler(written, replay).dump(state)
    return written.getvalue()


def restore(content: bytes, replay: "Replay") -> Any:  # noqa: ANN401 (what was pickled)
    """Return the state of a snapshot for another replay. pickle.UnpicklingError if it has what no snapshot has."""
    return _Unpickler(io.BytesIO(content), replay).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, replay: "Replay") -> None:
        super().__init__(file, protocol=5)
        self._replay = replay

    def persistent_id(self, value: object) -> str | None:
        return _REPLAY if value is self._replay else None

    def reducer_override(self, value: object) -> Any:  # noqa: ANN401 (pickle's)
        if isinstance(value, MethodType):
            return _method, (value.__self__, value.__func__.__name__)
        if isinstance(value, np.ndarray):
            memory: object = value.base
            if isinstance(memory, memoryview):
                return _view, (memory.obj,)
            assert memory is None and value.dtype == np.int32, "an array of another kind"  # noqa: PT018
            return _numbers, (value.tobytes(),)
        if isinstance(value, array):
            return array, (value.typecode, value.tobytes())
        is_lambda = isinstance(value, FunctionType) and "<lambda>" in value.__qualname__
        if is_lambda or isinstance(value, GenericAlias):
            return _stale, ()
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, replay: "Replay") -> None:
        super().__init__(file)
        self._replay = replay

    def persistent_load(self, key: object) -> "Replay":
        if key != _REPLAY:
            raise pickle.UnpicklingError(f"a reference to {key!r:.50}")
        return self._replay

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 (pickle's)
        if (known := _CLASSES.get((module, name))) is not None:
            return known
        if module == __name__ and (function := {each.__name__: each for each in _FUNCTIONS}.get(name)):
            return function
        if (module.startswith(_PACKAGES) or module in _MODULES) and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"it names {module[:50]}.{name[:50]}")


def _method(owner: object, name: str) -> Callable[..., Any]:
    """Return a method of a scheduler's or a cache's part, or of the replay."""
    function, module = getattr(type(owner), name, None), type(owner).__module__
    is_part = module.startswith(_PACKAGES) or module == "quire.engine.recording.replay"
    if not is_part or not isinstance(function, FunctionType):
        raise pickle.UnpicklingError(f"no method {name[:50]} of a {type(owner).__name__}")
    return MethodType(function, owner)


def _view(memory: "array[int]") -> NDArray[np.int32]:
    """Return the view of an array of numbers, over the same memory."""
    if not isinstance(memory, array) or memory.itemsize != np.int32().itemsize:
        raise pickle.UnpicklingError("a view of other memory")
    return np.frombuffer(memory, dtype=np.int32)


def _numbers(content: bytes) -> NDArray[np.int32]:
    """Return an array of its own."""
    return np.frombuffer(content, dtype=np.int32).copy()


def _stale() -> Callable[[], StepWork]:
    """Return what stands for a function of the step before, in place of which the next step sets another one."""
    return StepWork


_FUNCTIONS = (_method, _view, _numbers, _stale)
