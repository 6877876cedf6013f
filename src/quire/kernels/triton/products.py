"""Matrix products in Triton for weights of any format: dense, or quantized and expanded as they are multiplied.

One program computes a tile of rows and outputs, over all inputs in ascending order. A row's sum depends on the matrix
instruction and on the order of its inputs, not on the other rows of a tile. With `is_exact` all tiles have at least 64
rows, so that cards use one instruction for all of them, and add the same slices in the same order: a row has the same
bits in each (`exact_tiles`). Sums of int8 activations are those of `quantized.a8_sums` to the bit: integers within a
group, then one step in float32 per group. Addend, bias and activation are part of the product, and so are gates and
ups: their sums stay in registers, and each slice of inputs is read once for both.

Inputs pass in slices of one group of scales; a group's last slice is padded. A byte of 4-bit elements has one of an
even slice (low) and one of the slice behind it (high), so each half is used as it was loaded. A weight is read once for
each tile of rows, with 4 bytes per group of it. Nothing has been measured on a GPU yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels.layers import GATED, Activation
from quire.kernels.linear_weight import CODEBOOK4, DENSE, INT4, LinearWeight
from quire.kernels.quantized import ACTIVATION_LIMIT, SMALLEST_ABSMAX, WHOLE_NUMBERS, elements_of, in_group_order
from quire.kernels.triton import card
from quire.kernels.triton.row_groups import RowGroups
from quire.kernels.triton.triton_activation import activate, activated

LEAST_SLICE = 32     # the least depth of a product of int8 on matrix units
COLUMNS = 64         # outputs of a tile
FEW_ROWS = 16        # the least height of a product on matrix units
EXACT_ROWS = 64      # the least height of the wide product of sm_90 (wgmma) and of sm_100 (tcgen05)
LEAST_PROGRAMS = 128  # a launch has at least so many: about one on each processor of a card

LIMIT, SMALLEST = tl.constexpr(float(ACTIVATION_LIMIT)), tl.constexpr(SMALLEST_ABSMAX)
ROUNDING = tl.constexpr(WHOLE_NUMBERS)
E4M3_BIAS = tl.constexpr(2.0**8)  # between the exponents of float16 and e4m3


class Tile(NamedTuple):
    """The rows and outputs of a program, and how it is compiled."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, eq=False)
class TritonWeight:
    """A weight as the kernel reads it; `groups` of inputs have a step of their own, `ratio` of them share a scale.

    elements [out_features, in_features] if dense; else uint8 [out_features, num_slices * slice_size], half of that if
    4-bit. `order`: int64 [in_features] of the inputs, None where the groups of the checkpoint are consecutive.
    """

    elements: Tensor
    format: str
    out_features: int
    in_features: int
    dtype: torch.dtype    # inputs, and expanded values
    slice_size: int
    group_size: int
    ratio: int = 1
    is_a8: bool = False   # inputs are rounded to int8
    scales: Tensor | None = None
    zero_points: Tensor | int | None = None
    minimums: Tensor | None = None
    codebook: Tensor | None = None
    order: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tensors."""
        tensors = (self.elements, self.scales, self.zero_points, self.minimums, self.codebook, self.order)
        return sum(each.nbytes for each in tensors if isinstance(each, Tensor))


def pack(weight: LinearWeight) -> TritonWeight:
    """Return a weight packed on its device."""
    whole, sizes, dtype = elements_of(weight), (weight.out_features, weight.in_features), weight.value_dtype
    if weight.format == DENSE:
        length = 64 if whole.itemsize == 2 else LEAST_SLICE
        return TritonWeight(whole.contiguous(), DENSE, *sizes, dtype, length, weight.in_features)
    weight, order = in_group_order(weight)
    is_a8 = weight.activation_group_size > 0
    size = min(weight.activation_group_size or weight.group_size, weight.group_size, weight.in_features)
    is_half = weight.format in (INT4, CODEBOOK4)
    longest = 128 if is_a8 else LEAST_SLICE if is_half else 64  # what is expanded takes registers
    length = max(LEAST_SLICE, min(longest, size & -size))
    groups = F.pad(elements_of(weight), (0, -weight.in_features % size)).view(weight.out_features, -1, size)
    slices = F.pad(groups, (0, -size % length)).reshape(weight.out_features, -1, length)
    if is_half:
        slices = F.pad(slices, (0, 0, 0, slices.shape[1] % 2))
        slices = slices[:, 0::2] | slices[:, 1::2] << 4
    return TritonWeight(
        slices.flatten(1).contiguous(), weight.format, *sizes, dtype, length, size, weight.group_size // size, is_a8,
        weight.scales, weight.zero_points, weight.minimums, weight.codebook, order,
    )  # fmt: skip


def stack(weights: Sequence[TritonWeight]) -> TritonWeight:
    """Return weights of one shape and format as one, the rows of each behind those of the one before, in a copy.

    Sizes are those of a single weight. ConfigError where the groups of the checkpoint are not consecutive.
    """
    first = weights[0]
    for each in weights:
        assert (each.elements.shape, each.format) == (first.elements.shape, first.format), "weights of several kinds"
        if each.order is not None:
            raise ConfigError("experts with groups of scattered inputs (desc_act) are not supported on device cuda")

    def joined(name: str) -> Any:
        parts = [getattr(each, name) for each in weights]
        return torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]

    return replace(first, **{name: joined(name) for name in ("elements", "scales", "zero_points", "minimums")})


def product(
    x: Tensor, weight: TritonWeight, bias: Tensor | None = None, *, dtype: torch.dtype,
    activation: Activation = "none", addend: Tensor | None = None, is_exact: bool = False,
    groups: RowGroups | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return what `linear.reference` says, [num_rows, out_features] of `dtype`.

    x [num_rows, in_features]; rows may have gaps. With `is_exact` or int8 activations a row's bits do not depend on the
    other rows. Of rows in groups, each is multiplied with its own group's part of a stacked weight (`stack`), and those
    of no group are left out. `out`: where the result goes, of `dtype`; its rows may have gaps.
    """
    size, zeros = weight.slice_size, weight.zero_points
    num_rows = len(x) if groups is None else len(groups.order)
    height = tile_height(num_rows, is_exact=is_exact) if groups is None else groups.tile_height
    if activation in GATED and height > FEW_ROWS and weight.format != DENSE:  # two tiles of sums would spill registers
        both = product(x, weight, bias, dtype=dtype, addend=addend, is_exact=is_exact, groups=groups)
        return activate(both, activation)
    num_outputs = weight.out_features // (2 if activation in GATED else 1)
    tile = Tile(height, COLUMNS, 4 if height == FEW_ROWS or weight.format == DENSE else 8, 3 if x.itemsize == 2 else 2)
    if is_exact and groups is None and weight.format == DENSE and weight.dtype.itemsize == 2:
        tile = exact_tile(num_rows, num_outputs, card.capability(x.device), is_gated=activation in GATED)
    x = x.to(weight.dtype)
    x = x if weight.order is None else x[:, weight.order]
    assert x.shape[1] == weight.in_features, f"{tuple(x.shape)} for {weight.in_features} inputs"
    assert x.stride(1) == 1, "rows with gaps between inputs"
    out = torch.empty(num_rows, num_outputs, dtype=dtype, device=x.device) if out is None else out
    if not num_rows:
        return out
    itemsize = x.itemsize
    scales, totals = None, None
    if weight.is_a8:
        x, scales, totals = quantize(x, weight.group_size)
    num_groups = -(-weight.in_features // weight.group_size)
    num_tiles = triton.cdiv(num_rows, tile.rows) if groups is None else len(groups.tile_groups)
    _product_kernel[(num_tiles, triton.cdiv(num_outputs, tile.columns))](
        x, weight.elements, out, bias, addend, scales, totals, weight.scales,
        zeros if isinstance(zeros, Tensor) else None, weight.minimums, weight.codebook,
        *((None,) * 4 if groups is None else groups.tensors),
        num_rows, x.stride(0), out.stride(0), num_outputs, weight.elements.stride(0), weight.in_features, num_groups,
        0 if addend is None else addend.stride(0),
        FORMAT=weight.format, ZERO=0 if zeros is None or isinstance(zeros, Tensor) else zeros,
        GROUP_SIZE=weight.group_size, RATIO=weight.ratio, SLICES=triton.cdiv(weight.group_size, size), SLICE=size,
        IS_A8=weight.is_a8, IS_GATED=activation in GATED, ACTIVATION=activation, DTYPE=_of_triton(weight.dtype),
        PRECISION="ieee" if itemsize == 2 or is_exact else "tf32x3", SHARED_BY=num_rows // max(1, len(x)),
        ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.num_warps, num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def exact_tiles(capability: int, *, is_gated: bool) -> list[Tile]:
    """Return the tiles of exact products of 16-bit types on a card, the largest first; of all a row has the same bits.

    Few outputs of a program make many programs for few rows, with up to 8 slices of a weight on the way; large tiles
    read inputs and weights less often for many rows. None spills a register. In 99 KiB of shared memory, which sm_86,
    sm_89 and sm_120 have, fewer slices are on the way.
    """
    is_wide, is_small = card.has_wide_products(capability), capability in (86, 89, 120)
    num_stages = (8 if is_wide else 4 if is_small else 6) if not is_gated else 3 if is_small else 4
    large = [Tile(128, 256, 8, 3)] if is_wide and not is_gated else []
    return [
        *large,
        *([Tile(128, 128, 8, 3)] if is_wide or not is_gated else []),
        Tile(64, 128, 8 if is_gated else 4, 3),
        Tile(64, 64, 4, 3),
        Tile(64, 32, 4, num_stages),
        Tile(64, 16, 4, num_stages),
    ]


def exact_tile(num_rows: int, num_outputs: int, capability: int, *, is_gated: bool) -> Tile:
    """Return the largest tile of which there are enough for a card, with half of its rows used at least.

    Up to 16 rows are read by each program beside as many bytes of a weight or fewer, so there may be twice as many.
    """
    tiles = exact_tiles(capability, is_gated=is_gated)
    least = LEAST_PROGRAMS * (2 if num_rows <= FEW_ROWS else 1)
    for tile in tiles:
        num_programs = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_outputs, tile.columns)
        if num_programs >= least and (tile.rows == EXACT_ROWS or num_rows > EXACT_ROWS):
            return tile
    return tiles[-1]


def tile_height(num_rows: int, *, is_exact: bool) -> int:
    """Return the rows of a tile for so many rows of one weight."""
    return EXACT_ROWS if is_exact or num_rows > FEW_ROWS else FEW_ROWS


def quantize(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `quantized.quantize_activations` returns, to the bit, and the sums of groups, int32 like the scales.

    x [num_rows, in_features], rows may have gaps.
    """
    num_groups = triton.cdiv(x.shape[1], group_size)
    elements = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(len(x), num_groups, device=x.device)
    totals = torch.empty(len(x), num_groups, dtype=torch.int32, device=x.device)
    _quantize_kernel[(len(x), num_groups)](
        x, elements, scales, totals, x.stride(0), x.shape[1], num_groups, SIZE=group_size,
        BLOCK=min(1024, triton.next_power_of_2(group_size)), num_warps=1 if group_size <= 256 else 4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return elements, scales, totals


def _of_triton(dtype: torch.dtype) -> tl.dtype:
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


@triton.jit
def _quantize_kernel(
    x, elements, scales, totals, stride, num_inputs, num_groups, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """One group of one row."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = group * SIZE
    end = tl.minimum(begin + SIZE, num_inputs)
    absmax, is_finite = begin * 0.0, begin * 0 == 0
    for start in range(begin, end, BLOCK):
        inputs = start + tl.arange(0, BLOCK)
        values = tl.abs(tl.load(x + row * stride + inputs, mask=inputs < end, other=0.0).to(tl.float32))
        is_finite &= tl.min((values < float("inf")).to(tl.int32), 0) > 0
        absmax = tl.maximum(absmax, tl.max(tl.where(values < float("inf"), values, 0.0), 0))
    is_zero = absmax < SMALLEST
    factor = tl.where(is_finite & (absmax >= SMALLEST), tl.div_rn(LIMIT, tl.maximum(absmax, SMALLEST)), 0.0)
    total = begin * 0
    for start in range(begin, end, BLOCK):
        inputs = start + tl.arange(0, BLOCK)
        values = tl.load(x + row * stride + inputs, mask=inputs < end, other=0.0).to(tl.float32)
        scaled = tl.where(is_finite, values, 0.0) * factor
        whole = ((scaled + ROUNDING) - ROUNDING).to(tl.int32)  # to the nearest, ties to even
        total += tl.sum(whole, 0)
        tl.store(elements + row * num_inputs + inputs, whole.to(tl.int8), mask=inputs < end)
    scale = tl.where(is_finite, tl.where(is_zero, 0.0, tl.div_rn(absmax, LIMIT)), float("nan"))
    tl.store(scales + row * num_groups + group, scale)
    tl.store(totals + row * num_groups + group, total)


@triton.jit(do_not_specialize=("num_rows",))
def _product_kernel(
    x, elements, out, bias, addend, row_scales, row_totals, scales, zeros, minimums, codebook,
    order, starts, tile_groups, tile_rows,
    num_rows, x_stride, out_stride, num_outputs, element_stride, num_inputs, num_groups, addend_stride,
    FORMAT: tl.constexpr, ZERO: tl.constexpr, GROUP_SIZE: tl.constexpr, RATIO: tl.constexpr, SLICES: tl.constexpr,
    SLICE: tl.constexpr, IS_A8: tl.constexpr, IS_GATED: tl.constexpr, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, SHARED_BY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROWS rows and COLUMNS outputs; of a gated activation the gates, then the ups."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column, first = rows < num_rows, columns < num_outputs, 0
    if order is not None:  # rows of one group, by the group's weight
        group = tl.load(tile_groups + tl.program_id(0)).to(tl.int64)
        if group < 0:
            return
        first = group * num_outputs * (2 if IS_GATED else 1)
        places = tl.load(tile_rows + tl.program_id(0)) + tl.arange(0, ROWS)
        is_row = places < tl.load(starts + group + 1)
        rows = tl.load(order + places, mask=is_row, other=0).to(tl.int64)
    sums, ups = _sums(
        x, elements, bias, addend, row_scales, row_totals, scales, zeros, minimums, codebook, rows, columns, first,
        num_outputs, is_row, is_column, x_stride, element_stride, num_inputs, num_groups, addend_stride,
        FORMAT, ZERO, GROUP_SIZE, RATIO, SLICES, SLICE, IS_A8, IS_GATED, DTYPE, PRECISION, SHARED_BY, ROWS, COLUMNS,
    )  # fmt: skip
    if ACTIVATION != "none":  # applied to what a layer without it would have stored
        sums = activated(sums.to(out.dtype.element_ty), ups.to(out.dtype.element_ty), ACTIVATION)
    tl.store(out + rows[:, None] * out_stride + columns[None, :], sums, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _sums(
    x, elements, bias, addend, row_scales, row_totals, scales, zeros, minimums, codebook, rows, columns, first,
    num_outputs, is_row, is_column, x_stride, element_stride, num_inputs, num_groups, addend_stride,
    FORMAT: tl.constexpr, ZERO: tl.constexpr, GROUP_SIZE: tl.constexpr, RATIO: tl.constexpr, SLICES: tl.constexpr,
    SLICE: tl.constexpr, IS_A8: tl.constexpr, IS_GATED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    SHARED_BY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the sums of a tile, addend and bias included, [ROWS, COLUMNS] float32: gates and ups, or one twice.

    `first`: the row of the weight that makes the layer's output 0. SHARED_BY rows of the result have a row of x.
    """
    IS_HALF: tl.constexpr = (FORMAT == "int4") | (FORMAT == "codebook4")
    x_rows, ups_first = rows // SHARED_BY, first + tl.full((), num_outputs, tl.int64)
    total, exact = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.int32)
    ups, exact_ups = total, exact
    for number in range(0, num_groups * SLICES, 2 if IS_HALF else 1):
        loaded = _slice(elements, first + columns, number, is_column, element_stride, num_inputs, FORMAT, SLICE)
        if IS_GATED:
            loaded_ups = _slice(
                elements, ups_first + columns, number, is_column, element_stride, num_inputs, FORMAT, SLICE
            )
        for half in tl.static_range(2 if IS_HALF else 1):
            offsets = (number + half) % SLICES * SLICE + tl.arange(0, SLICE)
            inputs = (number + half) // SLICES * GROUP_SIZE + offsets
            is_input = (offsets < GROUP_SIZE) & (inputs < num_inputs)
            tile = tl.load(
                x + x_rows[:, None] * x_stride + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0
            )  # [ROWS, SLICE]
            some = (loaded >> 4 if half else loaded & 15) if IS_HALF else loaded
            total, exact = _fold(
                total, exact, tile, some, number + half, row_scales, row_totals, scales, zeros, minimums, codebook,
                x_rows, first + columns, is_row, is_column, num_groups,
                FORMAT, ZERO, RATIO, SLICES, IS_A8, DTYPE, PRECISION, COLUMNS,
            )  # fmt: skip
            if IS_GATED:
                some = (loaded_ups >> 4 if half else loaded_ups & 15) if IS_HALF else loaded_ups
                ups, exact_ups = _fold(
                    ups, exact_ups, tile, some, number + half, row_scales, row_totals, scales, zeros, minimums,
                    codebook, x_rows, ups_first + columns, is_row, is_column, num_groups,
                    FORMAT, ZERO, RATIO, SLICES, IS_A8, DTYPE, PRECISION, COLUMNS,
                )  # fmt: skip
    is_there = is_row[:, None] & is_column[None, :]
    if addend is not None:
        place = addend + rows[:, None] * addend_stride + columns[None, :]
        total += tl.load(place, mask=is_there, other=0.0)
        if IS_GATED:
            ups += tl.load(place + num_outputs, mask=is_there, other=0.0)
    if bias is not None:
        total += tl.load(bias + first + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            ups += tl.load(bias + ups_first + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    return total, ups if IS_GATED else total


@triton.jit
def _slice(
    elements, outputs, number, is_column, element_stride, num_inputs, FORMAT: tl.constexpr, SLICE: tl.constexpr
):
    """Return the elements of a slice of inputs as they are stored, [SLICE, COLUMNS]."""
    source = elements + outputs[None, :] * element_stride + tl.arange(0, SLICE)[:, None]
    if FORMAT == "dense":
        is_input = number * SLICE + tl.arange(0, SLICE) < num_inputs
        return tl.load(source + number * SLICE, mask=is_input[:, None] & is_column[None, :], other=0.0)
    place = number // 2 if (FORMAT == "int4") | (FORMAT == "codebook4") else number
    return tl.load(source + place * SLICE, mask=is_column[None, :], other=0)


@triton.jit
def _fold(
    total, exact, tile, some, number, row_scales, row_totals, scales, zeros, minimums, codebook, rows, columns,
    is_row, is_column, num_groups,
    FORMAT: tl.constexpr, ZERO: tl.constexpr, RATIO: tl.constexpr, SLICES: tl.constexpr, IS_A8: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the products of a slice of inputs with elements `some` [SLICE, COLUMNS] to the sums; return both sums."""
    group = number // SLICES
    if FORMAT == "dense":
        total = tl.dot(tile, some, total, input_precision=PRECISION)
    else:
        is_scale = is_column & (group < num_groups)
        place = columns * tl.cdiv(num_groups, RATIO) + group // RATIO
        scale = tl.load(scales + place, mask=is_scale, other=0.0)[None, :]
        zero = tl.full([1, COLUMNS], ZERO, tl.int32)
        if zeros is not None:
            zero = tl.load(zeros + place, mask=is_scale, other=0).to(tl.int32)[None, :]
        if IS_A8:
            CENTER: tl.constexpr = 128 if FORMAT == "int8" else 0  # taken off elements, so that they are signed
            signed = (some.to(tl.int32) - CENTER).to(tl.int8)
            exact = tl.dot(tile, signed, exact, out_dtype=tl.int32)
            is_group = is_row & (group < num_groups)
            row_total = tl.load(row_totals + rows * num_groups + group, mask=is_group, other=0)[:, None]
            row_scale = tl.load(row_scales + rows * num_groups + group, mask=is_group, other=0.0)[:, None]
            added = total + (exact - (zero - CENTER) * row_total).to(tl.float32) * (row_scale * scale)
            if minimums is not None:
                minimum = tl.load(minimums + place, mask=is_scale, other=0.0)[None, :]
                added -= row_total.to(tl.float32) * (row_scale * minimum)
            is_end = number % SLICES == SLICES - 1
            total = tl.where(is_end, added, total)
            exact = tl.where(is_end, 0, exact)
        else:
            if FORMAT == "fp8":  # its bits as those of a float16 with another exponent
                bits = ((some.to(tl.int32) & 127) << 7) | ((some.to(tl.int32) & 128) << 8)
                values = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * E4M3_BIAS
                values = tl.where((some & 127) == 127, float("nan"), values) * scale
            elif FORMAT == "codebook4":
                values = tl.load(codebook + some.to(tl.int32)) * scale
            elif minimums is not None:
                minimum = tl.load(minimums + place, mask=is_scale, other=0.0)[None, :]
                values = some.to(tl.float32) * scale - minimum
            else:
                values = (some.to(tl.int32) - zero).to(tl.float32) * scale
            total = tl.dot(tile, values.to(DTYPE), total, input_precision=PRECISION)
    return total, exact
