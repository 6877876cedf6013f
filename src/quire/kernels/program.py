"""Layer programs: op records over named activations, and the interpreter that runs them by single ops.

A program is a list of ops. An op reads and writes activations by name, each [num_tokens, ...]; `run` computes it by
single ops of the back end, which is the op's meaning: other interpreters are tested against it. `BackEnd.fuse` may
replace stretches of ops by one op of its own and leaves ops that it does not know as they are, so a new op is a class
with the attributes of `Op` and needs no other interpreter; `special_ops` has those that only some models need. The
memory of an activation belongs to the program: an op may overwrite what it reads, and an activation that it consumes
is not to be read again.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quire.kernels.delta_net import StateRows
from quire.kernels.layers import Linear, Norm
from quire.kernels.low_rank import RowAdapters
from quire.kernels.paged_attention import Attend, AttentionMetadata, AttentionSpec, Heads, RotarySpec, WriteKV
from quire.kernels.tensors import Tensor, added

if TYPE_CHECKING:
    from quire.kernels.read_rows import ReadRows

INPUT = "stream"  # the activation that a program begins with: the residual stream [num_tokens, width]

Activations = dict[str, Tensor]
NO_OTHERS: Mapping[str, Tensor] = {}


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Inputs of a step that ops read beside activations; caches by layer."""

    positions: Tensor      # [num_tokens] int64
    slot_mapping: Tensor   # [num_tokens] int64
    metadata: AttentionMetadata
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    adapters: RowAdapters | None = None  # None: no row has one
    states: Sequence[Tensor] = ()        # one for each layer that has some, uint8 [num_slots, num_bytes]
    state_rows: StateRows | None = None  # None: no layer has states
    added: tuple[NDArray[np.int64], Tensor] | None = None  # rows [n] of a step, and what layers add to them, [n, any]
    token_ids: Tensor | None = None      # [num_tokens] int64; None: no op reads them
    read_rows: "ReadRows | None" = None  # rows of the result; None: all


class Op(Protocol):
    """One op of a program."""

    @property
    def name(self) -> str:
        """The op's name, unique in its program: in logs, and where a gather or a part is to follow an op."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The activations that the op reads."""

    @property
    def writes(self) -> tuple[str, ...]:
        """The activations that the op writes."""

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        """Compute by single ops: the meaning of the op."""


class Names:
    """The activations that an op reads or writes: the values of these fields of it, without those that are None."""

    def __init__(self, *fields: str) -> None:
        self._fields = fields

    def __get__(self, op: object, kind: type | None = None) -> tuple[str, ...]:
        """Return the names of an op's activations."""
        names = (getattr(op, field) for field in self._fields)
        return tuple(name for name in names if name is not None)


@dataclass(frozen=True, slots=True)
class NormOp:
    """out = norm(x); with a residual, summed = x + residual and out = norm(summed), which consumes x and residual."""

    name: str
    norm: Norm
    x: str
    out: str
    residual: str | None = None
    summed: str | None = None   # None: not kept

    reads = Names("x", "residual")
    writes = Names("out", "summed")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        """Normalize, after adding the residual if there is one."""
        if self.residual is None:
            activations[self.out] = self.norm(activations[self.x])[0]
            return
        normed, summed = self.norm(activations.pop(self.x), activations.pop(self.residual))
        activations[self.out] = normed
        if self.summed is not None:
            activations[self.summed] = summed


@dataclass(frozen=True, slots=True)
class LinearOp:
    """out = linear(x), activation included, with what the adapters of rows add to its sums."""

    name: str
    linear: Linear
    x: str
    out: str

    reads = Names("x")
    writes = Names("out")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        x = activations[self.x]
        addend = None if inputs.adapters is None else inputs.adapters.addend(self.name, x)
        activations[self.out] = self.linear(x) if addend is None else self.linear(x, addend)


@dataclass(frozen=True, slots=True)
class SplitHeadsOp:
    """query, key and value [num_tokens, their heads, head_dim]: views of qkv, which is consumed.

    gate [num_tokens, num_heads * head_dim], if there is one, is behind the queries. There may be no value, or no key.
    """

    name: str
    heads: Heads
    qkv: str = "qkv"
    query: str = "query"
    key: str | None = "key"
    value: str | None = "value"
    gate: str | None = None

    reads = Names("qkv")
    writes = Names("query", "key", "value", "gate")

    @property
    def views(self) -> list[tuple[str, int, int | None]]:
        """Names, in the order of their columns; how many heads each has; and their dimensions, None: they are flat."""
        num_heads, num_kv_heads, head_dim = self.heads
        found = (self.query, num_heads, head_dim), (self.gate, num_heads, None)
        kept = ((name, num_kv_heads, head_dim) for name in (self.key, self.value))
        return [(name, count, dim) for name, count, dim in (*found, *kept) if name is not None]

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        """Make the views; nothing is computed."""
        qkv, head_dim, first = activations.pop(self.qkv), self.heads.head_dim, 0
        heads = qkv.reshape(len(qkv), qkv.shape[1] // head_dim, head_dim)
        for name, count, dim in self.views:
            stop = first + count
            activations[name] = heads[:, first:stop] if dim else qkv[:, first * head_dim : stop * head_dim]
            first = stop


@dataclass(frozen=True, slots=True)
class RotaryWriteOp:
    """Rotation of queries (in place) and keys by position, and the write of keys and values, consumed, to the cache.

    Without keys, queries alone are rotated: another layer has written to the cache.
    """

    name: str
    layer: int                  # index of the caches
    spec: RotarySpec
    write: WriteKV
    query: str = "query"
    key: str | None = "key"
    value: str | None = "value"  # None: values are parts of the keys, or there are no keys

    reads = Names("query", "key", "value")
    writes = Names("query")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        """Rotate and write, in one op of the back end."""
        query = activations.pop(self.query)
        key = None if self.key is None else activations.pop(self.key)
        value = None if self.value is None else activations.pop(self.value)
        keys, values = inputs.keys[self.layer], inputs.values[self.layer]
        activations[self.query] = self.write(
            self.spec, query, key, value, inputs.positions, keys, values, inputs.slot_mapping
        )


@dataclass(frozen=True, slots=True)
class AttentionOp:
    """out [num_tokens, num_heads * output_dim] = attention of the queries over the paged cache."""

    name: str
    layer: int                  # index of the caches
    spec: AttentionSpec
    attend: Attend
    query: str = "query"
    out: str = "attended"

    reads = Names("query")
    writes = Names("out")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        """Attend, in one op of the back end."""
        keys, values = inputs.keys[self.layer], inputs.values[self.layer]
        attended = self.attend(self.spec, activations[self.query], keys, values, inputs.metadata)
        activations[self.out] = attended.reshape(len(attended), attended.shape[1] * attended.shape[2])


@dataclass(frozen=True, slots=True)
class AddOp:
    """out = x + y."""

    name: str
    x: str
    y: str
    out: str
    width: int

    reads = Names("x", "y")
    writes = Names("out")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        activations[self.out] = added(activations[self.x], activations[self.y])


@dataclass(frozen=True, slots=True)
class CountLayerOp:
    """The end of a layer: adds 1 to the counter that stall detection reads."""

    name: str
    progress: NDArray[np.int64]  # [1]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        self.progress[0] += 1


@dataclass(frozen=True, slots=True)
class Program:
    """Ops from the activation INPUT, and perhaps others that the caller has, to the activation `result`."""

    ops: tuple[Op, ...]
    result: str
    dead: tuple[tuple[str, ...], ...] = field(init=False, repr=False)  # after each op: no later op reads them

    def __post_init__(self) -> None:
        alive = live_after(self.ops, self.result)
        dead = (tuple(set(op.reads + op.writes) - names) for op, names in zip(self.ops, alive, strict=True))
        object.__setattr__(self, "dead", tuple(dead))

    def run(self, x: Tensor, inputs: LayerInputs, others: Mapping[str, Tensor] = NO_OTHERS) -> Tensor:
        """Run the ops one after the other and return the result; x, and the `others`, are not to be used again."""
        activations = {INPUT: x, **others}
        del x, others
        if len(self.ops) > 1:
            run_ops(self.ops, self.dead, activations, inputs)
        else:
            self.ops[0].run(activations, inputs)  # all of them, fused
        return activations[self.result]


class OpTime(NamedTuple):
    """Seconds of one op, over all runs that were timed."""

    name: str
    kind: str
    seconds: float


@runtime_checkable
class TimedOps(Protocol):
    """Ops that time themselves: `stop_timing` returns the sums since `start_timing`."""

    def start_timing(self) -> None:
        """Time the runs to come."""

    def stop_timing(self) -> list[OpTime]:
        """Return the times of the ops, in their order."""


class _Timed:
    """An op with timed runs."""

    def __init__(self, op: Op) -> None:
        self.name, self.reads, self.writes = op.name, op.reads, op.writes
        self._op, self._seconds = op, 0.0

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        started_s = time.perf_counter()
        self._op.run(activations, inputs)
        self._seconds += time.perf_counter() - started_s

    def start_timing(self) -> None:
        self._seconds = 0.0

    def stop_timing(self) -> list[OpTime]:
        return [OpTime(self.name, type(self._op).__name__, self._seconds)]


class ProgramTimer:
    """`timed`, a program with the same ops, which are timed from now on."""

    def __init__(self, program: Program) -> None:
        self.untimed = program
        self._ops = [op if isinstance(op, TimedOps) else _Timed(op) for op in program.ops]
        self.timed = Program(tuple(self._ops), program.result)
        for op in self._ops:
            op.start_timing()

    def stop(self) -> list[OpTime]:
        """Return the times of all ops, in their order."""
        return [each for op in self._ops for each in op.stop_timing()]


def run_ops(
    ops: Sequence[Op], dead: Sequence[tuple[str, ...]], activations: Activations, inputs: LayerInputs
) -> None:
    """Run ops one after the other; drop the activations that are `dead` after each."""
    for op, names in zip(ops, dead, strict=True):
        op.run(activations, inputs)
        for name in names:
            activations.pop(name, None)


def live_after(ops: Sequence[Op], result: str) -> list[frozenset[str]]:
    """Return, for each op, the activations that are read after it."""
    alive, found = frozenset((result,)), []
    for op in reversed(ops):
        found.append(alive)
        alive = alive.difference(op.writes).union(op.reads)
    return found[::-1]
