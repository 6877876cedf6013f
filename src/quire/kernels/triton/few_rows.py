"""Products of few rows in Triton, for decodes of small batches: with the norm in front, and the residual behind, or the
rotation of queries and keys and the write of keys and values to the cache.

One program computes 16 to 64 outputs of all rows, up to 64, of a gated layer their gates and ups in one pass over the
inputs, which are added in ascending order; so there are enough programs for the memory of a card, and a weight is read
once. Each program reads all inputs, from the L2 cache: a tile has about as many outputs as rows, or these reads would
take longer than those of the weights. Of a layer with a residual two programs then share the inputs, and the one that
ends last adds up their sums, in order, so the result does not depend on which one that is. A norm is applied to the
inputs as they pass, but for the row's own factor: that multiplies the sums, for all inputs are needed to compute it.
From sm_90 on the kernel is launched while the one before it ends (programmatic dependent launch): it has its first
weights brought to the L2 cache, which that kernel does not write, and waits for its results. Nothing has been measured
on a GPU yet.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.layers import GATED
from quire.kernels.linear_weight import DENSE
from quire.kernels.program import (
    Activations,
    CountLayerOp,
    LayerInputs,
    LinearOp,
    NormOp,
    Op,
    Program,
    RotaryWriteOp,
    SplitHeadsOp,
    live_after,
    run_ops,
)
from quire.kernels.triton import card, triton_kv_cache_write
from quire.kernels.triton.triton_activation import activated
from quire.kernels.triton.triton_linear import CudaLinear
from quire.kernels.triton.triton_norm import TritonNorm

MAX_ROWS = 64
LEAST_COLUMNS, LEAST_PROGRAMS = 16, 96  # narrower tiles are taken until a launch has so many programs
MAX_SHARED_TILES = 192  # a launch with parts: with more tiles there are enough programs without
AHEAD = 8192  # weights that a program fetches before the wait: 8 MiB in 512 programs, 3 us of a card's memory
SECTOR = tl.constexpr(16)  # elements that the L2 cache fetches at least: 32 bytes


class FewRowsTile(NamedTuple):
    """Tile of a program for up to `max_rows` rows. A layer with a residual has `num_parts` programs of a tile.

    A program has at most 99 KiB of shared memory, in four stages: a processor of sm_86, 89 and 120 has no more.
    """

    max_rows: int
    rows: int  # the height of products on matrix units is at least 16
    columns: int
    depths: tuple[int, int, int]  # inputs at a time: of a layer, of one behind a norm, and of a gated one
    num_parts: int
    num_warps: int


TILES = (
    FewRowsTile(8, 16, 16, (256, 256, 256), 1, 4), FewRowsTile(16, 16, 32, (256, 128, 128), 1, 4),
    FewRowsTile(32, 32, 64, (128, 128, 64), 2, 8), FewRowsTile(MAX_ROWS, 64, 64, (64, 64, 64), 2, 8),
)  # fmt: skip
NO_HEADS = {"NUM_HEADS": 0, "NUM_KV_HEADS": 0, "HEAD_DIM": 0, "HALF": 0, "IS_INTERLEAVED": False}
DTYPES = (torch.bfloat16,)  # float16 might overflow: the norm's weight is applied before the row's factor


def serves(layer: object) -> bool:
    """Return whether a layer's few rows are computed here: dense in a type of DTYPES, and not exact."""
    if not isinstance(layer, CudaLinear) or layer.is_exact or layer.weight.format != DENSE:
        return False
    return layer.weight.dtype == layer.out_dtype and layer.out_dtype in DTYPES


def few_rows_product(
    x: Tensor, layer: CudaLinear, *, norm: TritonNorm | None = None, residual: Tensor | None = None
) -> Tensor:
    """Return layer(norm(x)) + residual, [num_rows, num_outputs] of x's dtype; the sum takes the place of the residual.

    x: [num_rows, in_features], at most MAX_ROWS; norm: an RMSNorm. Both are as in single ops, but for the
    rounding of normed inputs.
    """
    assert residual is None or residual.is_contiguous()
    num_outputs = layer.weight.out_features // (2 if layer.activation in GATED else 1)
    out = torch.empty(len(x), num_outputs, dtype=x.dtype, device=x.device) if residual is None else residual
    _launch(x, layer, norm, residual, out)
    return out


def projected_query(x: Tensor, layer: CudaLinear, norm: TritonNorm, op: RotaryWriteOp, inputs: LayerInputs) -> Tensor:
    """Return the rotated queries [num_rows, num_heads, head_dim] of layer(norm(x)); write its keys and values.

    x: [num_rows, in_features], at most MAX_ROWS. The caches have x's dtype. As `few_rows_product` and then `op`.
    """
    num_heads, num_kv_heads, head_dim = op.spec.heads
    keys, values = inputs.keys[op.layer], inputs.values[op.layer]
    assert layer.weight.out_features == (num_heads + 2 * num_kv_heads) * head_dim
    assert keys.shape == values.shape == (*keys.shape[:2], num_kv_heads, head_dim)
    assert keys.dtype == values.dtype == x.dtype, f"caches {keys.dtype}"
    assert keys.is_contiguous() and values.is_contiguous(), "caches with gaps"
    query = torch.empty(len(x), num_heads, head_dim, dtype=x.dtype, device=x.device)
    target = keys, values, inputs.slot_mapping, inputs.positions, op.spec.cos_sin
    _launch(
        x, layer, norm, None, query, target, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        HALF=op.spec.rotary_dim // 2, IS_INTERLEAVED=op.spec.is_interleaved,
    )  # fmt: skip
    return query


def _launch(
    x: Tensor, layer: CudaLinear, norm: TritonNorm | None, residual: Tensor | None, out: Tensor,
    target: tuple[Tensor | None, ...] = (None,) * 5, **heads: int,
) -> None:  # fmt: skip
    """Launch the kernel. `target`: the caches, slots, positions and angles where `out` has the queries alone."""
    (num_rows, num_inputs), weight = x.shape, layer.weight
    assert num_rows <= MAX_ROWS, f"{num_rows} rows"
    assert x.stride(1) == 1, "rows with gaps between inputs"
    is_gated = layer.activation in GATED
    num_outputs = weight.out_features // (2 if is_gated else 1)
    if not num_rows:
        return
    tile = next(tile for tile in TILES if tile.max_rows >= num_rows)
    columns, num_parts = tile.columns, 1
    if is_gated and tile.max_rows > 32 and not card.has_wide_products(card.capability(x.device)):
        columns //= 2  # the wider one spills there
    if residual is not None and norm is None and not is_gated and num_outputs <= MAX_SHARED_TILES * columns:
        num_parts = tile.num_parts
    while columns > LEAST_COLUMNS and triton.cdiv(num_outputs, columns) * num_parts < LEAST_PROGRAMS:
        columns //= 2
    depth, parts = tile.depths[2 if is_gated else int(norm is not None)], None
    if num_parts > 1:
        parts = torch.empty(num_parts, num_rows, num_outputs, dtype=torch.float32, device=x.device)
    is_overlapping = card.launches_early(x.device)
    _few_rows_kernel[(triton.cdiv(num_outputs, columns), num_parts)](
        x, weight.elements, layer.bias, None if norm is None else norm.weight, residual, out, parts,
        None if parts is None else _counters(x.device), *target, num_rows, x.stride(0), num_inputs, num_outputs,
        0.0 if norm is None else norm.eps, IS_GATED=is_gated, ACTIVATION=layer.activation,
        IS_WIDE=norm is not None and norm.offset is not None, OFFSET=(norm.offset if norm is not None else 0.0) or 0.0,
        OVERLAPS=is_overlapping, ROWS=tile.rows, COLUMNS=columns, DEPTH=depth, AHEAD=AHEAD // columns,
        NUM_PARTS=num_parts, **(heads or NO_HEADS), num_warps=tile.num_warps, num_stages=4, launch_pdl=is_overlapping,
    )  # fmt: skip


@cache
def _counters(device: torch.device) -> Tensor:
    """Return the counters of programs that share a tile; launches follow one another, and leave zeros."""
    return torch.zeros(MAX_SHARED_TILES, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class SummedProducts:
    """A layer, the norm of its results added to the stream, and the layer that reads it: two launches for few rows.

    `between`: ops that read nothing of them. `behind`: ops that make the second layer's results queries, and keys and
    values in the cache, in the second launch; or none. With more rows, or with adapters, the single ops run.
    """

    name: str
    first: LinearOp
    between: tuple[Op, ...]
    norm: NormOp
    second: LinearOp
    behind: tuple[()] | tuple[SplitHeadsOp, RotaryWriteOp]
    dead: tuple[tuple[str, ...], ...]  # after each of the single ops, as in a program

    @property
    def ops(self) -> tuple[Op, ...]:
        return (self.first, *self.between, self.norm, self.second, *self.behind)

    @property
    def reads(self) -> tuple[str, ...]:
        """The first layer's inputs and the stream."""
        return self.first.x, self.norm.reads[1]

    @property
    def writes(self) -> tuple[str, ...]:
        """The new stream, and the second layer's results or the queries of them."""
        return self.norm.writes[1], self.behind[1].query if self.behind else self.second.out

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        if len(activations[self.first.x]) > MAX_ROWS or inputs.adapters is not None:
            run_ops(self.ops, self.dead, activations, inputs)
            return
        first, second, norm = self.first.linear, self.second.linear, self.norm.norm
        assert isinstance(first, CudaLinear) and isinstance(second, CudaLinear) and isinstance(norm, TritonNorm)
        stream = few_rows_product(activations[self.first.x], first, residual=activations.pop(self.reads[1]))
        for op in self.between:
            op.run(activations, inputs)
        activations[self.writes[0]] = stream
        if self.behind and inputs.keys[self.behind[1].layer].dtype == stream.dtype:
            activations[self.writes[1]] = projected_query(stream, second, norm, self.behind[1], inputs)
            return
        activations[self.second.out] = few_rows_product(stream, second, norm=norm)
        for op in self.behind:  # a cache in 8 bits: its scales are those of whole heads
            op.run(activations, inputs)


def fuse(program: Program) -> Program:
    """Return a program with `SummedProducts` in place of the ops that they compute."""
    ops, alive = list(program.ops), live_after(program.ops, program.result)
    fused, index = list[Op](), 0
    while index < len(ops):
        found = _summed_products(ops[index : index + 6], program.dead[index : index + 6])
        length = 0 if found is None else len(found.ops)
        if found is not None and found.norm.out in alive[index + length - 1] - set(found.writes):
            found = None  # another op reads the normed stream
        fused.append(ops[index] if found is None else found)
        index += 1 if found is None else length
    return Program(tuple(fused), program.result)


def _summed_products(ops: list[Op], dead: tuple[tuple[str, ...], ...]) -> SummedProducts | None:
    """Return the op for the first three to six ops, a layer's end among them; None if they are others."""
    between = tuple(op for op in ops[1:2] if isinstance(op, CountLayerOp))
    first, *others = [ops[0], *ops[1 + len(between) :]]
    if len(others) < 2:
        return None
    norm, second = others[:2]
    if not (isinstance(first, LinearOp) and isinstance(norm, NormOp) and isinstance(second, LinearOp)):
        return None
    is_chain = first.out == norm.x and norm.out == second.x and norm.residual is not None and norm.summed is not None
    is_rms = isinstance(norm.norm, TritonNorm) and not norm.norm.centers
    if not (is_chain and is_rms and serves(first.linear) and serves(second.linear)):
        return None
    name, behind = f"{first.name} to {second.name}", _queries_behind(second, others[2:4])
    length = 3 + len(between) + len(behind)
    return SummedProducts(name, first, between, norm, second, behind, dead[:length])


def _queries_behind(layer: LinearOp, ops: list[Op]) -> tuple[()] | tuple[SplitHeadsOp, RotaryWriteOp]:
    """Return the two ops behind a layer if they split its results into heads, rotate and write them; else none."""
    if len(ops) < 2 or not (isinstance(split := ops[0], SplitHeadsOp) and isinstance(op := ops[1], RotaryWriteOp)):
        return ()
    is_chain = layer.out == split.qkv and split.writes == op.reads and split.heads == op.spec.heads
    is_whole = op.spec.heads.head_dim % 2 == 0 and op.write is triton_kv_cache_write.write_kv
    return (split, op) if is_chain and is_whole else ()


@triton.jit(do_not_specialize=("num_rows",))
def _few_rows_kernel(
    x, elements, bias, norm_weight, residual, out, parts, counters,
    key_cache, value_cache, slots, positions, cos_sin, num_rows, x_stride, num_inputs, num_outputs, eps,
    IS_GATED: tl.constexpr, ACTIVATION: tl.constexpr, IS_WIDE: tl.constexpr, OFFSET: tl.constexpr,
    OVERLAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, AHEAD: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """All rows of COLUMNS outputs, for one of NUM_PARTS parts of the inputs; with `slots`, of COLUMNS // 2 pairs of
    dimensions, a pair side by side.
    """
    rows, columns = tl.arange(0, ROWS), tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    if slots is not None:
        columns += _places_of_pairs(columns, HEAD_DIM, HALF, IS_INTERLEAVED)
    is_row, is_column, depths = rows < num_rows, columns < num_outputs, tl.arange(0, DEPTH)
    source = elements + columns[None, :] * num_inputs + depths[:, None]
    sums, ups = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    begin, end = _share_of_inputs(num_inputs, DEPTH, NUM_PARTS)
    if OVERLAPS:
        gdc_launch_dependents()
        sectors = tl.minimum(begin + tl.arange(0, AHEAD // SECTOR) * SECTOR, num_inputs - 1)[None, :]
        first = tl.minimum(columns, num_outputs - 1)
        _prefetch(elements + first[:, None] * num_inputs + sectors)
        if IS_GATED:
            _prefetch(elements + (first + num_outputs)[:, None] * num_inputs + sectors)
        gdc_wait()
    for start in range(begin, end, DEPTH):
        is_input = start + depths < num_inputs
        tile = tl.load(
            x + rows[:, None] * x_stride + start + depths[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0
        )
        if norm_weight is not None:
            wide = tile.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            factors = tl.load(norm_weight + start + depths, mask=is_input, other=0.0).to(tl.float32)
            tile = (wide * (factors + OFFSET if IS_WIDE else factors)[None, :]).to(tile.dtype)
        is_there = is_input[:, None] & is_column[None, :]
        sums = tl.dot(tile, tl.load(source + start, mask=is_there, other=0.0), sums)
        if IS_GATED:
            others = source + (tl.full((), num_outputs, tl.int64) * num_inputs + start)
            ups = tl.dot(tile, tl.load(others, mask=is_there, other=0.0), ups)
    if NUM_PARTS > 1:
        sums, is_last = _sum_of_parts(
            sums, parts, counters, rows[:, None], columns[None, :], is_row[:, None] & is_column[None, :], num_rows,
            num_outputs, NUM_PARTS,
        )  # fmt: skip
        is_row &= is_last
    if norm_weight is not None:
        factor = tl.rsqrt(squares / num_inputs + eps)[:, None]
        sums, ups = sums * factor, ups * factor
    if bias is not None:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            ups += tl.load(bias + num_outputs + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    values = sums.to(x.dtype.element_ty)
    if ACTIVATION != "none":
        values = activated(values, ups.to(values.dtype) if IS_GATED else values, ACTIVATION).to(values.dtype)
    if slots is not None:
        _store_heads(
            values, out, key_cache, value_cache, slots, positions, cos_sin, num_rows, num_outputs,
            ROWS, COLUMNS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HALF, IS_INTERLEAVED,
        )  # fmt: skip
    else:
        place, is_there = rows[:, None] * num_outputs + columns[None, :], is_row[:, None] & is_column[None, :]
        if residual is not None:  # as a norm adds it: to what the layer alone would have stored
            values = values.to(tl.float32) + tl.load(residual + place, mask=is_there, other=0.0).to(tl.float32)
        tl.store(out + place, values, mask=is_there)


@triton.jit
def _share_of_inputs(num_inputs, DEPTH: tl.constexpr, NUM_PARTS: tl.constexpr):
    """Return the first input of this program, and the first one behind its last."""
    if NUM_PARTS == 1:
        return 0, num_inputs
    share = tl.cdiv(tl.cdiv(num_inputs, NUM_PARTS), DEPTH) * DEPTH
    return tl.program_id(1) * share, tl.minimum((tl.program_id(1) + 1) * share, num_inputs)


@triton.jit
def _sum_of_parts(sums, parts, counters, rows, columns, is_there, num_rows, num_outputs, NUM_PARTS: tl.constexpr):
    """Store a part's sums; return those of all parts, added in order, in the program that ends last, and if it is that.

    Its counter is 0 before a launch and behind it.
    """
    place, stride = rows * num_outputs + columns, num_rows.to(tl.int64) * num_outputs
    tl.store(parts + tl.program_id(1) * stride + place, sums, mask=is_there)
    tl.debug_barrier()  # all stores of the program are before the count
    is_last = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel") == NUM_PARTS - 1
    sums = tl.load(parts + place, mask=is_there & is_last, other=0.0, cache_modifier=".cg")
    for part in tl.static_range(1, NUM_PARTS):
        sums += tl.load(parts + part * stride + place, mask=is_there & is_last, other=0.0, cache_modifier=".cg")
    tl.store(counters + tl.program_id(0), 0, mask=is_last)
    return sums, is_last


@triton.jit
def _places_of_pairs(columns, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """Return how far from `columns` the dimensions are of which even ones and the next are turned together."""
    dims = columns % HEAD_DIM
    moved = dims // 2 + dims % 2 * HALF - dims
    return tl.where((dims < 2 * HALF) & (not IS_INTERLEAVED), moved, 0)


@triton.jit
def _store_heads(
    values, query, key_cache, value_cache, slots, positions, cos_sin, num_rows, num_outputs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Turn pairs of queries and keys in float32, rounded once; store queries, and keys and values in their slots."""
    rows, is_row = tl.arange(0, ROWS)[:, None], (tl.arange(0, ROWS) < num_rows)[:, None]
    columns = (tl.program_id(0).to(tl.int64) * COLUMNS + 2 * tl.arange(0, COLUMNS // 2))[None, :]
    heads, dims, apart = columns // HEAD_DIM, columns % HEAD_DIM, 1
    first, second = tl.split(tl.reshape(values, [ROWS, COLUMNS // 2, 2]))
    if HALF > 0:
        is_turned = (dims < 2 * HALF) & (heads < NUM_HEADS + NUM_KV_HEADS)
        angles = cos_sin + tl.load(positions + rows, mask=is_row, other=0) * (2 * HALF) + dims // 2
        cos = tl.load(angles, mask=is_row & is_turned, other=1.0)
        sin = tl.load(angles + HALF, mask=is_row & is_turned, other=0.0)
        left, right = first.to(tl.float32), second.to(tl.float32)
        first = tl.where(is_turned, (left * cos - right * sin).to(first.dtype), first)
        second = tl.where(is_turned, (right * cos + left * sin).to(second.dtype), second)
        if not IS_INTERLEAVED:
            apart = tl.where(dims < 2 * HALF, HALF, 1)
            dims += _places_of_pairs(columns, HEAD_DIM, HALF, IS_INTERLEAVED)
    slot = tl.load(slots + rows, mask=is_row, other=-1)
    place = query + (rows * NUM_HEADS + heads) * HEAD_DIM + dims
    is_query = is_row & (heads < NUM_HEADS)
    tl.store(place, first, mask=is_query)
    tl.store(place + apart, second, mask=is_query)
    heads -= NUM_HEADS
    place = key_cache + (slot * NUM_KV_HEADS + heads) * HEAD_DIM + dims
    is_key = (slot >= 0) & (heads >= 0) & (heads < NUM_KV_HEADS)
    tl.store(place, first, mask=is_key)
    tl.store(place + apart, second, mask=is_key)
    heads -= NUM_KV_HEADS
    place = value_cache + (slot * NUM_KV_HEADS + heads) * HEAD_DIM + dims
    is_value = (slot >= 0) & (heads >= 0) & (columns < num_outputs)
    tl.store(place, first, mask=is_value)
    tl.store(place + apart, second, mask=is_value)


@triton.jit
def _prefetch(pointers):
    """Begin to fetch what the pointers are to into the L2 cache; nothing waits for it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )
