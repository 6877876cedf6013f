"""Values of arrays by the extension, converted between dtypes and checked: NumPy has no bfloat16, and no 8-bit floats.

PyTorch converts where the extension was not built.
"""

import numpy as np

from quire.core.arrays import BFLOAT16, FLOAT32, Array, DType, address, bits, dtype_name
from quire.kernels.cpp.isas import usable_isas


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
    from quire.kernels.cpp import _kernels  # noqa: PLC0415 (the extension is optional)

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
        from quire.kernels.cpp import _kernels  # noqa: PLC0415 (the extension is optional)

        kernel = _kernels.all_finite_bf16 if values.dtype == BFLOAT16 else _kernels.all_finite_float
        return bool(kernel(address(values), values.size))
    if values.dtype == BFLOAT16:
        return bool((bits(values) & 0x7F80 != 0x7F80).all())
    return bool(np.isfinite(values).all())
