"""Values of arrays by the extension: converted between dtypes, checked, and rounded to int8 or int4.

NumPy has no bfloat16, and no 8-bit floats. PyTorch converts where the extension was not built. A rounding means what
`quantized.round_to_nearest` does.
"""

import numpy as np

from quire.core.arrays import BFLOAT16, FLOAT8_E4M3, FLOAT32, UINT8, Array, DType, address, bits, dtype_name, empty
from quire.extension.isas import usable_isas
from quire.kernels.linear_weight import CODEBOOK4, DENSE, FP8, INT4, ZERO_POINTS, LinearWeight

ELEMENTS_AT_ONCE = 1 << 20  # converted to float32 at a time


def convert(array: Array, out: Array) -> None:
    """Write an array's values to `out`, of the same shape and without gaps, as its dtype.

    Both are of floats, `out` not of float64. Values go by way of float32 and are rounded to the nearest, ties to even;
    what is too large is infinite, in 8 bits the largest number. All threads take part.
    """
    assert array.shape == out.shape, f"{array.shape} to {out.shape}"
    assert out.flags.c_contiguous, "results with gaps"
    if not usable_isas():
        from quire.kernels.torch_arrays import to_tensor  # noqa: PLC0415 (loads torch)

        to_tensor(out).copy_(to_tensor(array))
        return
    from quire.extension import _kernels  # noqa: PLC0415 (the extension is optional)

    values = array if array.flags.c_contiguous else array.copy(order="C")
    kinds = [_kernels.VALUE_TYPES[dtype_name(each.dtype)] for each in (values, out)]
    _kernels.convert(address(values), kinds[0], address(out), kinds[1], values.size)


def converted(array: Array, dtype: DType) -> Array:
    """Return an array's values as `dtype`, as `convert` does; the array itself if that is its dtype."""
    if array.dtype == dtype:
        return array
    if not array.flags.c_contiguous and array.T.flags.c_contiguous:
        return converted(array.T, dtype).T
    out = np.empty(array.shape, dtype)
    convert(array, out)
    return out


def all_finite(array: Array) -> bool:
    """Return whether no float is NaN or infinite. All threads take part."""
    values = array.T if array.T.flags.c_contiguous else array
    if usable_isas() and values.flags.c_contiguous and values.dtype in (BFLOAT16, FLOAT32):
        from quire.extension import _kernels  # noqa: PLC0415 (the extension is optional)

        kernel = _kernels.all_finite_bf16 if values.dtype == BFLOAT16 else _kernels.all_finite_float
        return bool(kernel(address(values), values.size))
    if values.dtype == BFLOAT16:
        return bool((bits(values) & 0x7F80 != 0x7F80).all())
    return bool(np.isfinite(values).all())


def expand(weight: LinearWeight) -> Array:
    """Return the values [out_features, in_features] of a weight: floats as they are, others in float32."""
    elements = weight.elements()
    if weight.format == DENSE:
        return elements
    assert weight.scales is not None, f"a weight of {weight.format} without scales"
    groups = np.arange(weight.in_features) // weight.group_size if weight.group_index is None else weight.group_index
    values: Array
    if weight.format == FP8:
        values = converted(elements.view(FLOAT8_E4M3), FLOAT32)
    elif weight.format == CODEBOOK4:
        values = np.asarray(weight.codebook)[elements]
    else:
        zeros = weight.zero_points if isinstance(weight.zero_points, int | None) else weight.zero_points[:, groups]
        values = elements.astype(np.float32) - np.asarray(0 if zeros is None else zeros, np.float32)
    values = values * weight.scales[:, groups]
    return values if weight.minimums is None else values - weight.minimums[:, groups]


def round_to_nearest(
    weight: Array, weight_format: str, group_size: int, *, activation_group_size: int = 0
) -> LinearWeight:
    """Return weight [out_features, in_features], of finite floats, in int8 or int4, each value rounded to the nearest.

    `group_size` inputs share a scale, and one zero point serves all. Needs a byte for each element, and little more.
    All threads take part.
    """
    if not usable_isas():
        return _round_by_torch(weight, weight_format, group_size, activation_group_size)
    from quire.extension import _kernels  # noqa: PLC0415 (the extension is optional)

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
