"""Arithmetic of quantized linear weights, in PyTorch: the meaning that every kernel must match to the bit.

With int8 activations (A8), a row's inputs are rounded in groups that share a scale, sums over a group are of integers,
hence exact, and groups are added in ascending order. Every operation in float32 rounds by itself: none is fused.
Without (A16), the weight is expanded, each value rounded to the model's dtype, and multiplied as a dense one.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.linear_weight import CODEBOOK4, FP8, INT8, ZERO_POINTS, LinearWeight

ACTIVATION_LIMIT = 127  # largest int8 activation; the least is its negative
SMALLEST_ABSMAX = 1e-30  # below it a group of activations counts as zeros: its scale's reciprocal would overflow
NARROW_SCALE = 0.9  # int4: clips a group's extreme, and rounds the others finer; decision 0018
WHOLE_NUMBERS = 1.5 * 2**23  # from 2^23 to 2^24 float32 has nothing else
ELEMENTS_AT_ONCE = (1 << 15) - 1  # being quantized or expanded: too few for torch to start its threads
ELEMENTS_AT_ONCE_ON_GPU = 1 << 24  # 64 MiB for each tensor of float32 on the way
ROWS_AT_ONCE = 256  # rows of a weight that a thread quantizes at a time


def expand(weight: LinearWeight) -> Tensor:
    """Return the values [out_features, in_features] of a quantized weight, in bfloat16 if it is the model's dtype.

    They are in float32 for any other dtype, not rounded to it. Some rows are expanded at a time: a few tensors in
    float32 are made of them.
    """
    elements, num_rows = elements_of(weight), max(ELEMENTS_AT_ONCE // weight.in_features, 1)
    dtype = torch.bfloat16 if weight.value_dtype == torch.bfloat16 else torch.float32
    values = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=elements.device)
    for start in range(0, weight.out_features, num_rows):
        stop = min(start + num_rows, weight.out_features)
        values[start:stop] = _expanded(_row_range(weight, elements, start, stop))
    return values


def elements_of(weight: LinearWeight) -> Tensor:
    """Return the elements [out_features, in_features]: the only part itself, or all parts in a copy."""
    first: Tensor = weight.data[0]
    return first if len(weight.data) == 1 else torch.cat(weight.data)


def _row_range(weight: LinearWeight, elements: Tensor, start: int, stop: int) -> LinearWeight:
    """Return outputs [start, stop) of a weight with the elements [out_features, in_features]."""
    grouped = (weight.scales, weight.zero_points, weight.minimums)
    scales, zeros, minimums = (each[start:stop] if isinstance(each, Tensor) else each for each in grouped)
    assert not isinstance(scales, int)
    assert not isinstance(minimums, int)
    return replace(weight, data=(elements[start:stop],), out_features=stop - start, scales=scales, zero_points=zeros,
                   minimums=minimums)


def _expanded(weight: LinearWeight) -> Tensor:
    """Return the values of a weight of one part in float32."""
    scales = _per_input(weight.scales, weight)
    elements: Tensor = weight.data[0]
    if weight.format == FP8:
        return scales * elements.view(torch.float8_e4m3fn).float()
    if weight.format == CODEBOOK4:
        assert weight.codebook is not None
        codebook: Tensor = weight.codebook
        return scales * codebook[elements.long()]
    if weight.minimums is not None:
        return scales * elements.float() - _per_input(weight.minimums, weight)
    return scales * (elements.float() - _per_input(_grouped_zeros(weight), weight))


def quantize_activations(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return x [num_rows, in_features] as int8, and the scales of its groups, float32 [num_rows, num_groups].

    A group's scale is its greatest magnitude / 127, and 0 where that is below SMALLEST_ABSMAX. A group with a value
    that is not finite has the scale NaN and elements 0.
    """
    groups = _in_groups(x.float(), group_size)
    absmax = groups.abs().amax(dim=-1)  # [num_rows, num_groups]; NaN if any is
    is_finite, is_zero = absmax.isfinite(), absmax < SMALLEST_ABSMAX
    limit = torch.full_like(absmax, ACTIVATION_LIMIT)  # a number divided by a tensor would round twice
    factor = torch.where(is_finite & ~is_zero, limit / absmax, 0.0)
    elements = (torch.where(is_finite[..., None], groups, 0.0) * factor[..., None]).round().to(torch.int8)
    scales = torch.where(is_zero, 0.0, absmax / limit).masked_fill(~is_finite, float("nan"))
    return elements.flatten(1)[:, : x.shape[1]], scales


def int64_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [num_rows, in_features] times weight [out_features, in_features], of integers, as int64."""
    return x.long() @ weight.long().T


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return what `int64_product` returns, in floats that hold every partial sum: many times faster."""
    dtype = torch.float32 if x.shape[1] * ACTIVATION_LIMIT * 255 < 1 << 24 else torch.float64
    return x.to(dtype) @ weight.to(dtype).T


def a8_sums(x: Tensor, weight: LinearWeight, product: Callable[[Tensor, Tensor], Tensor] = int64_product) -> Tensor:
    """Return x W^T, float32 [num_rows, out_features], of x [num_rows, in_features] quantized in groups to int8."""
    weight, order = in_group_order(weight)
    x = x if order is None else x[:, order]
    assert weight.scales is not None
    elements, scales = quantize_activations(x, weight.activation_group_size)
    data, minimums = elements_of(weight), weight.minimums
    zeros = _grouped_zeros(weight)
    sums = torch.zeros(len(x), weight.out_features, device=x.device)
    for number, (inputs, group) in enumerate(_activation_groups(weight)):
        dot = product(elements[:, inputs], data[:, inputs])  # [num_rows, out_features]
        total = elements[:, inputs].sum(dim=1, keepdim=True, dtype=dot.dtype)
        scale = scales[:, number, None]
        sums = sums + (dot - zeros[:, group].to(dot.dtype) * total).float() * (scale * weight.scales[:, group])
        if minimums is not None:
            sums = sums - total.float() * (scale * minimums[:, group])
    return sums


def in_group_order(weight: LinearWeight) -> tuple[LinearWeight, Tensor | None]:
    """Return a weight with groups of consecutive inputs, and the order int64 [in_features] in which it has the inputs.

    The order is None where groups are consecutive already. Groups keep their sizes, which must be those of consecutive
    ones.
    """
    if weight.group_index is None:
        return weight, None
    order = weight.group_index.sort(stable=True).indices
    consecutive = torch.arange(weight.in_features, device=order.device) // weight.group_size
    assert torch.equal(weight.group_index[order].long(), consecutive), "groups of other sizes than consecutive ones"
    return replace(weight, data=tuple(part[:, order] for part in weight.data), group_index=None), order


def round_to_nearest(
    weight: Tensor, weight_format: str, group_size: int, *, activation_group_size: int = 0
) -> LinearWeight:
    """Return weight [out_features, in_features], of finite floats, in int8 or int4, each value rounded to the nearest.

    `group_size` inputs share a scale, and one zero point serves all. Needs a byte for each element, and little more.
    """
    (out_features, in_features), zero = weight.shape, ZERO_POINTS[weight_format]
    is_on_host = weight.device.type == "cpu"
    at_once = ELEMENTS_AT_ONCE if is_on_host else ELEMENTS_AT_ONCE_ON_GPU
    size, step = min(group_size, in_features), max(1, at_once // in_features)
    data = torch.empty(out_features, in_features, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(out_features, -(-in_features // size), device=weight.device)

    def round_some(first: int, num_rows: int) -> None:
        for start in range(first, min(first + num_rows, out_features), step):
            rows = slice(start, min(start + step, first + num_rows))
            data[rows], scales[rows] = _round_rows(weight[rows].float(), size, zero)

    if is_on_host:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # threads meet once, and not after every operation
            list(pool.map(lambda first: round_some(first, ROWS_AT_ONCE), range(0, out_features, ROWS_AT_ONCE)))
    else:
        round_some(0, out_features)
    return LinearWeight(
        weight_format, (data,), out_features, in_features, scales, zero, group_size,
        activation_group_size=activation_group_size, dtype=weight.dtype,
    )  # fmt: skip


def _round_rows(rows: Tensor, group_size: int, zero: int) -> tuple[Tensor, Tensor]:
    """Return the elements uint8 [num_rows, in_features] and scales [num_rows, num_groups] of rows of float32.

    int8 has one more value below zero than above and does without. int4 has too few for that: a group's extreme value
    becomes -8, by a scale of its opposite sign, and of two such scales the one with the smaller squared error is taken.
    """
    groups = _in_groups(rows, group_size)
    highest, lowest = groups.amax(dim=-1), groups.amin(dim=-1)  # [num_rows, num_groups]
    extreme = torch.where(highest > -lowest, highest, lowest)
    extreme = torch.where(extreme.abs() < SMALLEST_ABSMAX, 0.0, extreme)
    if zero == ZERO_POINTS[INT8]:
        scales = extreme.abs() / (zero - 1)
        elements = _near_whole_numbers(groups, scales, zero).view(torch.int32)  # the lowest byte is the whole number
    else:
        scales = extreme / -zero
        elements = _nearest(groups, scales, -zero, zero - 1)
        narrow = scales * NARROW_SCALE
        others = _nearest(groups, narrow, -zero, zero - 1)
        is_better = _squared_error(groups, others, narrow) < _squared_error(groups, elements, scales)
        scales, elements = torch.where(is_better, narrow, scales), torch.where(is_better[..., None], others, elements)
        elements.add_(zero)
    return elements.flatten(1)[:, : rows.shape[1]].to(torch.uint8), scales


def _nearest(groups: Tensor, scales: Tensor, low: int, high: int) -> Tensor:
    """Return the multiples of each group's scale that are nearest, as whole numbers from `low` to `high`."""
    return _near_whole_numbers(groups, scales).sub_(WHOLE_NUMBERS).clamp_(low, high)


def _near_whole_numbers(groups: Tensor, scales: Tensor, zero: int = 0) -> Tensor:
    """Return the nearest multiples of each group's scale, plus `zero`, behind WHOLE_NUMBERS.

    Sums of this size are whole numbers, rounded to even; torch's round starts its threads for any number of elements.
    """
    factor = torch.where(scales == 0, 0.0, scales.reciprocal())
    return (groups * factor[..., None]).add_(WHOLE_NUMBERS + zero)


def _squared_error(groups: Tensor, elements: Tensor, scales: Tensor) -> Tensor:
    return (elements * scales[..., None]).sub_(groups).square_().sum(dim=-1)


def _in_groups(x: Tensor, group_size: int) -> Tensor:
    """Return x [num_rows, in_features] as [num_rows, num_groups, group_size]; zeros fill the last group."""
    size = min(group_size, x.shape[1])
    missing = -x.shape[1] % size
    return (F.pad(x, (0, missing)) if missing else x).reshape(len(x), -(-x.shape[1] // size), size)


def _activation_groups(weight: LinearWeight) -> Iterator[tuple[slice, int]]:
    """Yield the inputs of each group of activations, and the group of the weight that has them."""
    size = min(weight.activation_group_size, weight.in_features)
    for start in range(0, weight.in_features, size):
        yield slice(start, min(start + size, weight.in_features)), start // weight.group_size


def _grouped_zeros(weight: LinearWeight) -> Tensor:
    """Return the zero points, whole numbers in float32 [out_features, num_groups]; zeros where there are minimums."""
    assert weight.scales is not None
    zeros = weight.zero_points
    return zeros.float() if isinstance(zeros, Tensor) else torch.full_like(weight.scales, zeros or 0)


def _per_input(grouped: Tensor | None, weight: LinearWeight) -> Tensor:
    """Return [out_features, in_features] of values [out_features, num_groups]."""
    assert grouped is not None
    if weight.group_index is not None:
        return grouped[:, weight.group_index.long()]
    size = min(weight.group_size, weight.in_features)
    return grouped.repeat_interleave(size, dim=1)[:, : weight.in_features]
