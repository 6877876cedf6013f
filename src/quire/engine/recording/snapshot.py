"""Snapshot of a replay between two steps: what a file of a record begins with, if another one came before it.

It has the objects of the scheduler and its cache, in which tokens, salts and clients are sealed already, as msgpack: a
list of nodes, which refer to each other by their places in it. A file may come from anywhere, so a node names its class
in a table of the classes of schedulers, caches and their plain data, and nothing is called but the constructors of
containers and of plain records.
"""

import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import count
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from quire.core.step_times import StepWork

if TYPE_CHECKING:
    from quire.engine.recording.replay import RecordReplay

_PACKAGES = ("quire.scheduling.", "quire.cache.")
_MODULES = frozenset(
    f"quire.core.{name}" for name in (
        "config", "deltas", "logprob_table", "plan", "pooling", "sampling_params", "sequence", "step_times",
        "structured_outputs", "token_ids",
    )
)  # fmt: skip
_CONTAINERS: dict[str, Callable[..., Any]] = {
    "list": list, "dict": dict, "set": set, "deque": deque, "OrderedDict": OrderedDict, "Counter": Counter,
}  # fmt: skip
_FACTORIES = {"list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str}
_ATOMS = (type(None), bool, int, float, str, bytes)

Node = tuple[str, str, list[Any]]     # kind, class or name, values: an atom, or the place of a node in a list of one


def snapshot(replay: "RecordReplay", state: object) -> bytes:
    """Return a state that refers to a replay's parts, as `restore` reads it."""
    return msgspec.msgpack.encode(_Writer(replay).nodes_of(state))


def restore(content: bytes, replay: "RecordReplay") -> Any:  # noqa: ANN401 (what was written)
    """Return the state of a snapshot for another replay. Raises any error if it is none."""
    return _Reader(msgspec.msgpack.decode(content, type=list[Node]), replay).read()


def _classes() -> dict[str, type]:
    """Return the classes that a snapshot may have, by name: those of modules that schedulers have loaded."""
    return {
        f"{name}:{each.__name__}": each
        for name, module in [*sys.modules.items()] if name.startswith(_PACKAGES) or name in _MODULES
        for each in vars(module).values() if isinstance(each, type) and each.__module__ == name
    }  # fmt: skip


def _slots(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        names = each.__dict__.get("__slots__", ())
        yield from (names,) if isinstance(names, str) else names


class _Writer:
    def __init__(self, replay: "RecordReplay") -> None:
        self._replay = replay
        self._places: dict[int, int] = {}       # places in `_objects`, by the ids of objects
        self._objects: list[object] = []        # they stay, so that no other gets the id of one

    def nodes_of(self, state: object) -> list[Node]:
        """Return the nodes of an object and of all that it refers to; its own is the first."""
        self._value(state)
        nodes = list[Node]()
        while len(nodes) < len(self._objects):
            nodes.append(self._node(self._objects[len(nodes)]))
        return nodes

    def _value(self, value: object) -> object:
        if isinstance(value, _ATOMS) and not isinstance(value, Enum):
            return value
        place = self._places.get(id(value))
        if place is None:
            place = self._places[id(value)] = len(self._objects)
            self._objects.append(value)
        return [place]

    def _values(self, values: Any) -> list[object]:  # noqa: ANN401 (of any container)
        return [self._value(each) for each in values]

    def _node(self, value: Any) -> Node:  # noqa: ANN401, PLR0911 (a line for each kind)
        kind = type(value)
        name = f"{kind.__module__}:{kind.__name__}"
        if value is self._replay:
            return "replay", "", []
        if isinstance(value, array):
            return "array", value.typecode, [value.tobytes()]
        if isinstance(value, bytearray):
            return "bytearray", "", [bytes(value)]
        if isinstance(value, np.ndarray):
            memory: object = value.base
            assert value.dtype == np.int32, "numbers of another size"
            return ("view", "", [self._value(memory.obj)]) if isinstance(memory, memoryview) else (
                "numbers", "", [value.tobytes()]
            )  # fmt: skip
        if isinstance(value, MethodType):
            return "method", value.__func__.__name__, [self._value(value.__self__)]
        if isinstance(value, FunctionType):
            return "stale", "", []
        if isinstance(value, count):
            return "count", "", [value.__reduce__()[1][0]]
        if isinstance(value, Enum):
            return "enum", name, [value.name]
        if isinstance(value, msgspec.Struct):
            return "struct", name, self._values(getattr(value, field) for field in value.__struct_fields__)
        if isinstance(value, tuple):
            return ("tuple", "" if kind is tuple else name, self._values(value))
        if isinstance(value, frozenset):
            return "frozenset", "", self._values(value)
        if isinstance(value, defaultdict):
            return "defaultdict", getattr(value.default_factory, "__name__", ""), self._values(_flat(value))
        if kind.__name__ in _CONTAINERS and kind.__module__ in ("builtins", "collections"):
            items = _flat(value) if isinstance(value, dict) else value
            limit = [value.maxlen] if isinstance(value, deque) else []
            return "container", kind.__name__, limit + self._values(items)
        return self._instance(value, name)

    def _instance(self, value: Any, name: str) -> Node:  # noqa: ANN401
        """Return the node of an object: its attributes, then the items of a dictionary."""
        attributes = {slot: getattr(value, slot) for slot in _slots(type(value)) if hasattr(value, slot)}
        attributes |= {key: each for key, each in getattr(value, "__dict__", {}).items() if key != "__orig_class__"}
        attributes.pop("__dict__", None)
        attributes.pop("__weakref__", None)
        items = _flat(value) if isinstance(value, dict) else ()
        return "object", name, [len(attributes), *self._values(_flat(attributes)), *self._values(items)]


def _flat(items: dict[Any, Any]) -> Iterator[Any]:
    for pair in items.items():
        yield from pair


class _Reader:
    def __init__(self, nodes: list[Node], replay: "RecordReplay") -> None:
        self._nodes, self._replay, self._classes = nodes, replay, _classes()
        self._made: dict[int, Any] = {}

    def read(self) -> Any:  # noqa: ANN401
        """Return the object of the first node."""
        state = self._object(0)
        attributes, hashed = list[int](), list[int]()   # objects first: keys of the others may be compared by them
        place = 0
        while place < len(self._nodes):
            self._object(place)
            kind, name, _ = self._nodes[place]
            if kind in ("object", "container", "defaultdict"):
                (attributes if kind == "object" or name in ("list", "deque") else hashed).append(place)
            place += 1
        for each in attributes:
            self._fill(each)
        for each in hashed:
            self._fill(each)
        for each in attributes:
            self._fill_items(each)
        return state

    def _value(self, value: Any) -> Any:  # noqa: ANN401
        return self._object(value[0]) if isinstance(value, list) else value

    def _object(self, place: int) -> Any:  # noqa: ANN401
        """Return the object of a node; containers and instances are filled later."""
        if place not in self._made:
            self._made[place] = self._make(*self._nodes[place])
        return self._made[place]

    def _make(self, kind: str, name: str, values: list[Any]) -> Any:  # noqa: ANN401, PLR0911, PLR0912 (likewise)
        match kind:
            case "replay":
                return self._replay
            case "object":
                found: Any = self._classes[name]
                return found.__new__(found)
            case "container":
                return deque(maxlen=values[0]) if name == "deque" else _CONTAINERS[name]()
            case "defaultdict":
                return defaultdict(_FACTORIES[name])
            case "tuple":
                own = [self._value(each) for each in values]
                return self._classes[name](*own) if name else tuple(own)
            case "struct":
                return self._classes[name](*[self._value(each) for each in values])
            case "frozenset":
                return frozenset(self._value(each) for each in values)
            case "enum":
                return self._classes[name][values[0]]  # type: ignore[index]
            case "array":
                return array(name, values[0])
            case "bytearray":
                return bytearray(values[0])
            case "view":
                memory = self._value(values[0])
                assert isinstance(memory, array) and memory.itemsize == 4, "a view of other memory"  # noqa: PT018
                return np.frombuffer(memory, dtype=np.int32)
            case "numbers":
                return np.frombuffer(values[0], dtype=np.int32).copy()
            case "count":
                return count(values[0])
            case "stale":
                return StepWork     # stands for a function of the step before; the next step sets another one
            case "method":
                return self._method(self._value(values[0]), name)
        raise ValueError(f"a node of kind {kind!r:.50}")

    def _method(self, owner: object, name: str) -> MethodType:
        function = getattr(type(owner), name, None)
        is_part = owner is self._replay or type(owner) in self._classes.values()
        if not is_part or not isinstance(function, FunctionType):
            raise ValueError(f"no method {name!r:.50} of a {type(owner).__name__}")
        return MethodType(function, owner)

    def _fill(self, place: int) -> None:
        """Set the attributes of an object, or fill a container."""
        kind, name, values = self._nodes[place]
        made = self._made[place]
        if kind == "object":
            num = values[0]
            for key, value in _pairs(values[1 : 1 + 2 * num]):
                object.__setattr__(made, key, self._value(value))
        elif kind == "defaultdict" or isinstance(made, dict):
            for key, value in _pairs(values):
                made[self._value(key)] = self._value(value)
        elif name == "set":
            made.update(self._value(each) for each in values)
        else:
            made.extend(self._value(each) for each in (values[1:] if name == "deque" else values))

    def _fill_items(self, place: int) -> None:
        """Fill an object that is a dictionary, too."""
        kind, _, values = self._nodes[place]
        if kind == "object" and len(values) > 1 + 2 * values[0]:
            for key, value in _pairs(values[1 + 2 * values[0] :]):
                dict.__setitem__(self._made[place], self._value(key), self._value(value))


def _pairs(flat: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)
