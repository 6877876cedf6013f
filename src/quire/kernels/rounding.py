"""Rounding of weights of floats to int8 or int4, by the extension; the meaning is `quantized.round_to_nearest`'s."""

import numpy as np

from quire.core.arrays import FLOAT32, UINT8, Array, address, empty
from quire.kernels.conversion import converted
from quire.kernels.cpp.isas import usable_isas
from quire.kernels.linear_weight import INT4, ZERO_POINTS, LinearWeight

ELEMENTS_AT_ONCE = 1 << 20  # converted to float32 at a time


def round_to_nearest(
    weight: Array, weight_format: str, group_size: int, *, activation_group_size: int = 0
) -> LinearWeight:
    """Return weight [out_features, in_features], of finite floats, in int8 or int4, each value rounded to the nearest.

    `group_size` inputs share a scale, and one zero point serves all. Needs a byte for each element, and little more.
    All threads take part.
    """
    if not usable_isas():
        return _round_by_torch(weight, weight_format, group_size, activation_group_size)
    from quire.kernels.cpp import _kernels  # noqa: PLC0415 (the extension is optional)

    out_features, in_features = weight.shape
    size, step = min(group_size, in_features), max(ELEMENTS_AT_ONCE // in_features, 1)
    elements = empty((out_features, in_features), UINT8)
    scales = np.empty((out_features, -(-in_features // size)), FLOAT32)
    for start in range(0, out_features, step):
        rows = np.ascontiguousarray(converted(weight[start : start + step], FLOAT32))
        places = address(elements[start:]), address(scales[start:])
        _kernels.round_to_nearest(address(rows), len(rows), in_features, size, weight_format == INT4, *places)
    return LinearWeight(
        weight_format, (elements,), out_features, in_features, scales, ZERO_POINTS[weight_format], group_size,
        activation_group_size=activation_group_size, dtype=weight.dtype,
    )  # fmt: skip


def _round_by_torch(weight: Array, weight_format: str, group_size: int, activation_group_size: int) -> LinearWeight:
    from quire.kernels import quantized  # noqa: PLC0415 (loads torch)
    from quire.kernels.torch_arrays import to_tensor, weight_of_arrays  # noqa: PLC0415

    return weight_of_arrays(quantized.round_to_nearest(
        to_tensor(weight), weight_format, group_size, activation_group_size=activation_group_size
    ))  # fmt: skip
