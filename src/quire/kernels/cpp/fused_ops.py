"""Fusion of layer programs: stretches of ops as one call of the extension; csrc/program.hpp has the reasons.

An op is fused if `TRANSLATIONS` has its class and its parts are this back end's own. Any other op runs by itself
between two stretches, and the log names it.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy as np

from quire.core.arrays import FLOAT32, Array, DType
from quire.extension import _kernels
from quire.kernels import program as ops
from quire.kernels import special_ops
from quire.kernels.cpp.cpp_attention import attention_parameters, metadata_arguments, paged_attention
from quire.kernels.cpp.cpp_delta_net import (
    checked_states,
    delta_net,
    delta_net_weights,
    gate,
    mamba,
    mamba_weights,
    state_arguments,
)
from quire.kernels.cpp.cpp_experts import CppExperts
from quire.kernels.cpp.cpp_kv_cache import CacheSizes, layer_cache, rotary_parameters, write_kv
from quire.kernels.cpp.cpp_linear import CppLinear, CppUp
from quire.kernels.cpp.cpp_norm import CppNorm
from quire.kernels.cpp.cpp_short_conv import checked_tails, convolution_arguments, short_conv
from quire.kernels.cpp.dtypes import kernel_dtype, pair
from quire.kernels.layers import Linear
from quire.kernels.low_rank import AdapterWeights, LowRankLayer, Up
from quire.kernels.program import Activations, LayerInputs, Op, OpTime, Program, live_after
from quire.kernels.read_rows import ReadRowsOp

log = logging.getLogger(__name__)

MAX_NAMES_IN_LOG = 5
NO_STATES = (0,) * 5
_PROGRAM = pair("Program")
_CACHE_OPS = (ops.AttentionOp, ops.RotaryWriteOp, special_ops.ShortConvOp)
_STATE_OPS = (special_ops.DeltaNetOp, special_ops.MambaOp)


def fuse(program: Program) -> Program:
    """Return the program with stretches of known ops fused; unchanged in dtypes that kernels serve by conversion."""
    norms = (op.norm for op in program.ops if isinstance(op, ops.NormOp))
    dtype = next((norm.dtype for norm in norms if isinstance(norm, CppNorm)), None)
    if dtype is None or kernel_dtype(dtype) != dtype:
        return program
    fused: list[Op] = []
    numbered = zip(program.ops, live_after(program.ops, program.result), strict=True)
    for is_known, group in groupby(numbered, key=lambda pair: _is_known(pair[0])):
        stretch, alive = zip(*group, strict=True)
        parts = [op.fused(fuse) if isinstance(op, ReadRowsOp) else op for op in stretch]
        fused += [FusedOps(stretch, alive[-1], dtype)] if is_known else parts
    _log_unknown([op.name for op in program.ops if not isinstance(op, ReadRowsOp) and not _is_known(op)])
    return Program(tuple(fused), program.result)


def _is_known(op: Op) -> bool:
    translation = TRANSLATIONS.get(type(op))
    return translation is not None and translation.accepts(op)


def _log_unknown(names: Sequence[str]) -> None:
    if names:
        shown = ", ".join(names[:MAX_NAMES_IN_LOG]) + (", ..." if len(names) > MAX_NAMES_IN_LOG else "")
        log.info("ops that the C++ kernels do not fuse run by themselves, %d of them: %s", len(names), shown)


class TensorView(NamedTuple):
    """Columns of an activation's memory as an activation."""

    base: int
    offset: int
    width: int
    head_dim: int | None  # None: [num_tokens, width]; else [num_tokens, heads, head_dim]

    def of(self, memory: Array) -> Array:
        if self.head_dim is None and self.width == memory.shape[1]:
            return memory
        columns = memory[:, self.offset : self.offset + self.width]
        if self.head_dim is None:
            return columns
        return columns.reshape(len(memory), self.width // self.head_dim, self.head_dim)


class Buffers:
    """Memory of a stretch's activations, by index, while its ops are translated in their order."""

    def __init__(self) -> None:
        self.inputs: dict[str, int] = {}            # what the stretch reads of ops before it
        self._views: list[TensorView] = []                # at its index; memory of its own has its index as base
        self._bound: dict[str, int] = {}            # the index of each name at this point
        self._own: dict[tuple[str, int], int] = {}  # name, width -> index
        self.linears: list[str] = []                # names of linear ops, by number

    def read(self, name: str, width: int, head_dim: int | None = None) -> int:
        """Return the index of an activation that an op reads, or changes in place."""
        if name not in self._bound:
            assert name not in self.inputs, f"{name} has been consumed"
            self.inputs[name] = self.write(name, width, head_dim)
        index = self._bound[name]
        assert self._views[index].width == width, f"{name} of width {self._views[index].width} is read as {width}"
        return index

    def consume(self, *names: str) -> None:
        """Forget activations that are not to be read again."""
        for name in names:
            del self._bound[name]

    def write(self, name: str, width: int, head_dim: int | None = None) -> int:
        """Return the index of an activation that an op writes to memory of its own."""
        key = name, width
        if key not in self._own:
            self._own[key] = len(self._views)
            self._views.append(TensorView(len(self._views), 0, width, head_dim))
        self._bound[name] = self._own[key]
        return self._own[key]

    def columns(self, base: int, offset: int, width: int) -> int:
        """Return the index of columns of an activation, without a name."""
        assert self._views[base].base == base, "a view of a view"
        self._views.append(TensorView(base, offset, width, None))
        return len(self._views) - 1

    def view(self, name: str, base: int, offset: int, width: int, head_dim: int | None = None) -> int:
        """Let a name stand for columns of another activation; return its index."""
        assert self._views[base].base == base, "a view of a view"
        self._bound[name] = len(self._views)
        self._views.append(TensorView(base, offset, width, head_dim))
        return self._bound[name]

    def memory_of(self, views: Iterable[int]) -> list[int]:
        """Return the memory that views together fill, each once."""
        widths = dict[int, int]()
        for view in map(self._views.__getitem__, views):
            widths[view.base] = widths.get(view.base, 0) + view.width
        assert all(self._views[base].width == width for base, width in widths.items()), "columns of no view"
        return list(widths)

    def number_linear(self, name: str) -> int:
        """Return the number of a linear op, by which adapters have its factors."""
        self.linears.append(name)
        return len(self.linears) - 1

    def part(self, name: str, first_head: int, num_heads: int) -> None:
        """Let a view stand for some of its heads."""
        base, offset, _, head_dim = self._views[self._bound[name]]
        assert head_dim is not None, f"{name} has no heads"
        self._bound[name] = len(self._views)
        self._views.append(TensorView(base, offset + first_head * head_dim, num_heads * head_dim, head_dim))

    def outputs(self, names: Iterable[str]) -> dict[str, TensorView]:
        """Return where these activations are after the last op."""
        return {name: self._views[self._bound[name]] for name in names}

    def externals(self, outputs: Iterable[TensorView]) -> dict[int, tuple[str | None, int]]:
        """Return the memory that the caller passes, by ascending index: the name of the input in it, and its width."""
        names: dict[int, str | None] = dict.fromkeys([view.base for view in outputs])
        names |= {index: name for name, index in self.inputs.items()}
        return {index: (names[index], self._views[index].width) for index in sorted(names)}

    def records(self, externals: Iterable[int]) -> list[_kernels.Buffer]:
        """Return all of them as the extension takes them."""
        passed = set(externals)
        return [
            _kernels.Buffer(view.width, -1 if view.base == index else view.base, view.offset, index in passed)
            for index, view in enumerate(self._views)
        ]


class FusedOps:
    """A stretch of ops in one call. Keeps the ops: the extension reads their memory."""

    def __init__(self, stretch: Sequence[Op], alive: frozenset[str], dtype: DType) -> None:
        self.name = f"{stretch[0].name} to {stretch[-1].name}"
        self._ops, self._dtype = tuple(stretch), dtype
        buffers = Buffers()
        translated, self._translated_ops = list[Any](), list[Op]()
        for op in stretch:
            records = [*TRANSLATIONS[type(op)].records(op, buffers)]
            translated += records
            self._translated_ops += [op] * len(records)
        self._outputs = buffers.outputs(alive.intersection(name for op in stretch for name in op.writes))
        self.reads, self.writes = tuple(buffers.inputs), tuple(self._outputs)
        self._externals = buffers.externals(self._outputs.values())
        self._cache_ops = {op.layer: op for op in stretch if isinstance(op, _CACHE_OPS)}
        self._state_ops = [op for op in stretch if isinstance(op, _STATE_OPS)]
        self._program = _PROGRAM[dtype](translated, buffers.records(self._externals))
        self._first_keys: Callable[[], Array | None] = lambda: None  # caches of the addresses that the extension has
        self._linears = buffers.linears
        self._factors = WeakKeyDictionary[AdapterWeights, _kernels.AdapterFactors]()

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        """Run the stretch; activations that it reads may be overwritten."""
        if inputs.keys and inputs.keys[0] is not self._first_keys():
            self._use_caches(inputs)
        num_tokens, positions, slots = len(inputs.positions), inputs.positions, inputs.slot_mapping
        assert num_tokens == inputs.metadata.query_starts[-1] == len(slots)
        assert positions.dtype == slots.dtype == np.int64
        assert positions.flags.c_contiguous, "positions with gaps"
        assert slots.flags.c_contiguous, "slots with gaps"
        arrays, addresses = dict[int, Array](), list[int]()
        for index, (name, width) in self._externals.items():
            if name is None:
                rows = np.empty((num_tokens, width), self._dtype)
            else:
                rows = np.ascontiguousarray(activations[name]).reshape(num_tokens, width)
                assert rows.shape == (num_tokens, width), f"{rows.shape} for {num_tokens} rows of {width}"
                assert rows.dtype == self._dtype, f"{rows.dtype} for ops in {self._dtype}"
            arrays[index] = rows
            addresses.append(_kernels.address(rows))
        assert num_tokens == 0 or len(set(addresses)) == len(addresses), "two activations in the same memory"
        step = (
            num_tokens, _kernels.address(positions), _kernels.address(slots), *metadata_arguments(inputs.metadata),
            *(NO_STATES if inputs.state_rows is None else state_arguments(inputs.state_rows)),
        )  # fmt: skip
        if inputs.adapters is None:
            self._program.run(addresses, *step)
        else:
            adapters, of_row, *_ = inputs.adapters
            assert (of_row.dtype, of_row.shape) == (np.int32, (num_tokens,)), "an adapter for each row"
            factors = [self._factors_of(adapter) for adapter in adapters]
            self._program.run_with_adapters(addresses, factors, _kernels.address(of_row), *step)
        for name, view in self._outputs.items():
            activations[name] = view.of(arrays[view.base])

    def start_timing(self) -> None:
        """Time each op of the runs to come."""
        self._program.start_timing()

    def stop_timing(self) -> list[OpTime]:
        """Return the times of the ops; one that is translated to several records has several."""
        times = zip(self._translated_ops, self._program.stop_timing(), strict=True)
        return [OpTime(op.name, type(op).__name__, seconds) for op, seconds in times]

    def _factors_of(self, adapter: AdapterWeights) -> _kernels.AdapterFactors:
        """Return an adapter's factors of the stretch's linear ops; they stay valid as long as the adapter."""
        if adapter not in self._factors:
            layers = [_low_rank(adapter.layers.get(name)) for name in self._linears]
            self._factors[adapter] = _kernels.AdapterFactors(layers)
        return self._factors[adapter]

    def _use_caches(self, inputs: LayerInputs) -> None:
        block_size, unused = inputs.metadata.block_size, _kernels.LayerCache(0, 0, 0, 1.0, 1.0)
        caches = [unused] * len(inputs.keys)
        for layer, op in self._cache_ops.items():
            if isinstance(op, special_ops.ShortConvOp):
                address = _kernels.address(checked_tails(op.spec, inputs.keys[layer], block_size, self._dtype))
                caches[layer] = _kernels.LayerCache(address, 0, _kernels.KV_FORMATS["same"], 1.0, 1.0)
                continue
            _, num_kv_heads, head_dim = op.spec.heads
            sizes = CacheSizes(num_kv_heads, block_size, head_dim, op.spec.value_dim)
            keys, values = inputs.keys[layer], inputs.values[layer]
            caches[layer] = layer_cache(keys, values, sizes, self._dtype, op.spec.kv_scales)
        states = [0] * len(inputs.states)
        for net in self._state_ops:
            states[net.layer] = _kernels.address(checked_states(net.spec, inputs.states[net.layer], self._dtype))
        self._program.use_caches(caches, states, block_size)
        self._first_keys = ref(inputs.keys[0])  # weak: a model outlives the cache of an engine that sleeps


def _low_rank(layer: LowRankLayer | None) -> _kernels.LowRankFactors:
    if layer is None:
        return _kernels.LowRankFactors(0, 0, [])
    parts = [
        _kernels.LowRankPart(_packed(part.up), part.first_input, part.rank, part.first_output, part.num_outputs)
        for part in layer.parts
    ]
    return _kernels.LowRankFactors(_packed(layer.down), layer.rank, parts)


def _packed(factor: Linear | Up) -> int:
    assert isinstance(factor, CppLinear | CppUp)
    return factor.packed_address


class Translation(NamedTuple):
    """Fusion of a class of ops: a test for parts of this back end, and the extension's records of an op."""

    accepts: Callable[[Any], bool]
    records: Callable[[Any, Buffers], list[object]]


def _norm(op: ops.NormOp, buffers: Buffers) -> list[object]:
    assert isinstance(op.norm, CppNorm)
    width = op.norm.width
    x = buffers.read(op.x, width)
    if op.residual is None:
        return [_kernels.NormOp(x, -1, -1, buffers.write(op.out, width), op.norm.weights)]
    residual = buffers.read(op.residual, width)
    buffers.consume(op.x, op.residual)
    summed = x if op.summed is None else buffers.write(op.summed, width)  # x's memory is free
    return [_kernels.NormOp(x, residual, summed, buffers.write(op.out, width), op.norm.weights)]


def _linear(op: ops.LinearOp, buffers: Buffers) -> list[object]:
    assert isinstance(op.linear, CppLinear)
    in_features, out_features = op.linear.sizes
    x, out = buffers.read(op.x, in_features), buffers.write(op.out, out_features)
    assert x != out, f"{op.name} would overwrite its input"
    return [_kernels.LinearOp(x, out, buffers.number_linear(op.name), op.linear.weights)]


def _experts(op: special_ops.ExpertsOp, buffers: Buffers) -> list[object]:
    assert isinstance(op.experts, CppExperts)
    x = buffers.read(op.x, op.experts.width)
    scored = -1 if op.scored is None else buffers.read(op.scored, op.experts.num_scored)
    out = buffers.write(op.out, op.experts.num_outputs)
    return [_kernels.ExpertsOp(x, scored, out, op.experts.weights)]


def _split_heads(op: ops.SplitHeadsOp, buffers: Buffers) -> list[object]:
    head_dim = op.heads.head_dim
    qkv, offset = buffers.read(op.qkv, sum(count * head_dim for _, count, _ in op.views)), 0
    buffers.consume(op.qkv)
    for name, count, dim in op.views:
        buffers.view(name, qkv, offset, count * head_dim, dim)
        offset += count * head_dim
    return []


def _take_heads(op: special_ops.TakeHeadsOp, buffers: Buffers) -> list[object]:
    first_query, first_kv = op.first
    num_heads, num_kv_heads, head_dim = op.heads
    counts = (op.query, num_heads), (op.key, num_kv_heads), (op.value, num_kv_heads)
    for name, count in counts:
        _read_heads(name, count, head_dim, buffers)
    buffers.part(op.query, first_query, op.taken.num_heads)
    for name in (op.key, op.value):
        buffers.part(name, first_kv, op.taken.num_kv_heads)
    return []


def _read_heads(name: str, num_heads: int, head_dim: int, buffers: Buffers) -> int:
    return buffers.read(name, num_heads * head_dim, head_dim)


def _qk_norm(op: special_ops.QKNormOp, buffers: Buffers) -> list[object]:
    assert isinstance(op.query_norm, CppNorm)
    assert isinstance(op.key_norm, CppNorm)
    num_heads, num_kv_heads, head_dim = op.heads
    query = _read_heads(op.query, num_heads, head_dim, buffers)
    key = _read_heads(op.key, num_kv_heads, head_dim, buffers)
    norms = op.query_norm.weights, op.key_norm.weights
    sizes = num_heads, head_dim, num_kv_heads, head_dim
    if op.is_over_heads:
        sizes = 1, num_heads * head_dim, 1, num_kv_heads * head_dim
    assert (op.query_norm.width, op.key_norm.width) == sizes[1::2]
    return [_kernels.QKNormOp(query, key, *norms, *sizes)]


def _head_norm(op: special_ops.HeadNormOp, buffers: Buffers) -> list[object]:
    assert isinstance(op.norm, CppNorm)
    assert op.norm.width == op.width
    columns, head_dim = op.num_rows * op.width, op.width if op.is_of_heads else None
    x = buffers.read(op.x, columns, head_dim)
    out = x if op.out == op.x else buffers.write(op.out, columns, head_dim)
    return [_kernels.HeadNormOp(x, out, op.norm.weights, op.num_rows, op.width)]


def _rotary_write(op: ops.RotaryWriteOp, buffers: Buffers) -> list[object]:
    num_heads, num_kv_heads, head_dim = op.spec.heads
    query = _read_heads(op.query, num_heads, head_dim, buffers)
    key, value = (
        -1 if name is None else _read_heads(name, num_kv_heads, head_dim, buffers) for name in (op.key, op.value)
    )
    buffers.consume(*op.reads[1:])
    return [_kernels.RotaryWriteOp(query, key, value, op.layer, rotary_parameters(op.spec))]


def _attention(op: ops.AttentionOp, buffers: Buffers) -> list[object]:
    num_heads, _, head_dim = op.spec.heads
    query = _read_heads(op.query, num_heads, head_dim, buffers)
    out = buffers.write(op.out, num_heads * op.spec.output_dim)
    return [_kernels.AttentionOp(query, out, op.layer, attention_parameters(op.spec))]


def _short_conv(op: special_ops.ShortConvOp, buffers: Buffers) -> list[object]:
    x = buffers.read(op.x, 3 * op.spec.width)
    buffers.consume(op.x)
    out = buffers.write(op.out, op.spec.width)
    return [_kernels.ShortConvOp(x, out, op.layer, *convolution_arguments(op.spec), op.spec.length)]


def _delta_net(op: special_ops.DeltaNetOp, buffers: Buffers) -> list[object]:
    heads = op.spec.heads

    def read_both(name: str, width: int, other: str | None, other_width: int) -> tuple[int, int]:
        if other is not None:
            return buffers.read(name, width), buffers.read(other, other_width)
        both = buffers.read(name, width + other_width)
        return buffers.columns(both, 0, width), buffers.columns(both, width, other_width)

    x, gates = read_both(op.x, heads.channels, op.gates, heads.width)
    shares, decays = read_both(op.rates, heads.num_value_heads, op.decays, heads.num_decays)
    buffers.consume(*op.reads)
    out = buffers.write(op.out, heads.width)
    return [_kernels.DeltaNetOp(x, gates, shares, decays, out, op.layer, delta_net_weights(op.spec))]


def _mamba(op: special_ops.MambaOp, buffers: Buffers) -> list[object]:
    heads = op.spec.heads
    x = buffers.read(op.x, heads.width + heads.inputs)
    buffers.consume(op.x)
    return [_kernels.MambaOp(x, buffers.write(op.out, heads.width), op.layer, mamba_weights(op.spec))]


def _gate(op: special_ops.GateOp, buffers: Buffers) -> list[object]:
    return [_kernels.GateOp(buffers.read(op.x, op.width), buffers.read(op.gate, op.width), True)]


def _multiply(op: special_ops.MultiplyOp, buffers: Buffers) -> list[object]:
    y = buffers.columns(buffers.read(op.y, op.num_columns), op.first, op.width)
    return [_kernels.GateOp(buffers.read(op.x, op.width), y, False)]


def _position_scale(op: special_ops.PositionScaleOp, buffers: Buffers) -> list[object]:
    query = _read_heads(op.query, op.heads.num_heads, op.heads.head_dim, buffers)
    assert op.factors.dtype == FLOAT32
    assert op.factors.flags.c_contiguous
    return [_kernels.PositionScaleOp(query, _kernels.address(op.factors))]


def _split_latent(op: special_ops.SplitLatentOp, buffers: Buffers) -> list[object]:
    assert isinstance(op.key_norm, CppNorm)
    query_norm = op.query_norm or op.key_norm
    assert isinstance(query_norm, CppNorm)
    qkv = buffers.read(op.qkv, op.query_width + op.key_width)
    buffers.consume(op.qkv)
    query = buffers.view(op.query, qkv, 0, op.query_width)
    key = buffers.view(op.key, qkv, op.query_width, op.key_width, op.key_width)
    sizes = int(op.query_norm is not None), op.query_width, 1, op.latent_dim
    return [_kernels.QKNormOp(query, key, query_norm.weights, op.key_norm.weights, *sizes)]


def _head_linear(op: special_ops.HeadLinearOp, buffers: Buffers) -> list[object]:
    num_heads, (num_inputs, num_outputs) = len(op.linears), op.sizes
    x = buffers.read(op.x, num_heads * (num_inputs + op.num_passed))
    width = num_outputs + op.num_passed
    out = buffers.write(op.out, num_heads * width, None if op.is_flat else width)
    assert x != out, f"{op.name} would overwrite its input"
    weights = [linear.weights for linear in op.linears if isinstance(linear, CppLinear)]
    return [_kernels.HeadLinearOp(x, out, op.num_passed, weights)]


def _scale(op: special_ops.ScaleOp, buffers: Buffers) -> list[object]:
    x = buffers.read(op.x, op.width)
    return [_kernels.SumOp(x, -1, x, op.factor, 0.0)]


def _clip(op: special_ops.ClipOp, buffers: Buffers) -> list[object]:
    num_heads, num_kv_heads, head_dim = op.heads
    counts = (op.query, num_heads), (op.key, num_kv_heads), (op.value, num_kv_heads)
    views = [_read_heads(name, count, head_dim, buffers) for name, count in counts]
    return [_kernels.SumOp(x, -1, x, 1.0, op.limit) for x in buffers.memory_of(views)]


def _add(op: ops.AddOp, buffers: Buffers) -> list[object]:
    x, y = buffers.read(op.x, op.width), buffers.read(op.y, op.width)
    return [_kernels.SumOp(x, y, buffers.write(op.out, op.width), 1.0, 0.0)]


def _tap(op: special_ops.TapOp, buffers: Buffers) -> list[object]:
    x, *rest = (buffers.read(name, op.width) for name in op.reads)
    return [_kernels.SumOp(x, rest[0] if rest else -1, buffers.write(op.out, op.width), 1.0, 0.0)]


def _gather(op: special_ops.GatherOp, buffers: Buffers) -> list[object]:
    assert op.hook.address is not None
    x = buffers.read(op.x, op.hook.num_own)
    return [_kernels.GatherOp(x, buffers.write(op.x, op.hook.width), _kernels.ColumnExchange(*op.hook.address))]


def _summed_linear(op: special_ops.SummedLinearOp, buffers: Buffers) -> list[object]:
    assert isinstance(op.linear, CppLinear)
    assert op.hook.address is not None
    in_features, out_features = op.linear.sizes
    x, out = buffers.read(op.x, in_features), buffers.write(op.out, out_features)
    number = buffers.number_linear(op.name)
    return [_kernels.SummedLinearOp(x, out, number, op.linear.weights, _kernels.SumExchange(*op.hook.address))]


def _count_layer(op: ops.CountLayerOp, buffers: Buffers) -> list[object]:
    return [_kernels.CountLayerOp(_kernels.address(op.progress))]


TRANSLATIONS: dict[type, Translation] = {
    ops.NormOp: Translation(lambda op: isinstance(op.norm, CppNorm), _norm),
    ops.LinearOp: Translation(lambda op: isinstance(op.linear, CppLinear), _linear),
    special_ops.ExpertsOp: Translation(lambda op: isinstance(op.experts, CppExperts), _experts),
    ops.SplitHeadsOp: Translation(lambda op: True, _split_heads),
    special_ops.TakeHeadsOp: Translation(lambda op: True, _take_heads),
    special_ops.QKNormOp: Translation(
        lambda op: isinstance(op.query_norm, CppNorm) and isinstance(op.key_norm, CppNorm), _qk_norm
    ),
    ops.RotaryWriteOp: Translation(lambda op: op.write is write_kv, _rotary_write),
    ops.AttentionOp: Translation(lambda op: op.attend is paged_attention, _attention),
    special_ops.ShortConvOp: Translation(lambda op: op.convolve is short_conv, _short_conv),
    special_ops.DeltaNetOp: Translation(lambda op: op.compute is delta_net, _delta_net),
    special_ops.MambaOp: Translation(lambda op: op.compute is mamba, _mamba),
    special_ops.GateOp: Translation(lambda op: op.compute is gate, _gate),
    special_ops.HeadNormOp: Translation(lambda op: isinstance(op.norm, CppNorm), _head_norm),
    special_ops.MultiplyOp: Translation(lambda op: True, _multiply),
    special_ops.PositionScaleOp: Translation(lambda op: True, _position_scale),
    special_ops.SplitLatentOp: Translation(lambda op: isinstance(op.key_norm, CppNorm), _split_latent),
    special_ops.HeadLinearOp: Translation(
        lambda op: all(isinstance(linear, CppLinear) for linear in op.linears), _head_linear
    ),
    special_ops.ScaleOp: Translation(lambda op: True, _scale),
    special_ops.ClipOp: Translation(lambda op: True, _clip),
    ops.AddOp: Translation(lambda op: True, _add),
    special_ops.TapOp: Translation(lambda op: True, _tap),
    special_ops.GatherOp: Translation(lambda op: op.hook.address is not None, _gather),
    special_ops.SummedLinearOp: Translation(
        lambda op: isinstance(op.linear, CppLinear) and op.hook.address is not None, _summed_linear
    ),
    ops.CountLayerOp: Translation(lambda op: True, _count_layer),
}
