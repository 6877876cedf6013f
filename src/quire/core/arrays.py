"""Arrays: NumPy's, with the dtypes that NumPy lacks, and memory for large ones on huge pages.

An array of bfloat16 or of 8-bit floats has a structured dtype of one field, so that it carries its meaning wherever it
goes: it is sliced, copied, stacked and reshaped as any array, and NumPy refuses to compute with it. It does not refuse
`astype`, nor to assign it to numbers, and then takes bits for integers: `quire.kernels.conversion` converts values.
"""

import mmap
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
DType = np.dtype[Any]

FLOAT64, FLOAT32, FLOAT16 = np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16)
BFLOAT16 = np.dtype([("bfloat16", "<u2")])
FLOAT8_E4M3 = np.dtype([("float8_e4m3", "u1")])  # e4m3fn: without infinities
FLOAT8_E8M0 = np.dtype([("float8_e8m0", "u1")])  # powers of two: exponents with 127 added, 255 is NaN
UINT8, INT32, INT64 = np.dtype(np.uint8), np.dtype(np.int32), np.dtype(np.int64)

STORED_DTYPES: Mapping[str, DType] = {  # keyed by safetensors' names
    "F64": FLOAT64, "F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16, "F8_E4M3": FLOAT8_E4M3,
    "F8_E8M0": FLOAT8_E8M0,
    "I64": INT64, "I32": INT32, "I16": np.dtype(np.int16), "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64), "U32": np.dtype(np.uint32), "U16": np.dtype(np.uint16), "U8": UINT8,
    "BOOL": np.dtype(np.bool_),
}  # fmt: skip
MODEL_DTYPES: Mapping[str, DType] = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}  # as in `--dtype`

HUGE_PAGE_BYTES = 2 << 20
READ_AHEAD_BYTES = 32 << 10  # prefetches of kernels reach behind the last weight


def dtype_name(dtype: Any) -> str:  # noqa: ANN401 (an array's, or PyTorch's, which this module does not load)
    """Return the name of a dtype of an array or a tensor: float32, bfloat16, float8_e4m3 (PyTorch's: float8_e4m3fn)."""
    if not isinstance(dtype, np.dtype):
        return str(dtype).removeprefix("torch.")
    return dtype.name if dtype.names is None else dtype.names[0]


def bits(array: Array) -> Array:
    """Return an array's elements as unsigned integers of their size, in the same memory."""
    return array.view(f"u{array.dtype.itemsize}")


def address(array: Array | None) -> int:
    """Return where the first element of an array is in memory; 0 for None."""
    return 0 if array is None else int(array.__array_interface__["data"][0])


def empty(shape: int | tuple[int, ...], dtype: DType) -> Array:
    """Return memory of its own; one of at least a huge page is on huge pages, where the system has them.

    On a busy day weights on small pages are read at half the speed. Large memory begins at a huge page, is all zeros,
    and takes no page before it is written to. It is private, for what processes share gets huge pages only where an
    administrator has asked for them.
    """
    num_elements = shape if isinstance(shape, int) else prod(shape)
    num_bytes = num_elements * dtype.itemsize
    if num_bytes < HUGE_PAGE_BYTES:
        return np.empty(shape, dtype)
    num_pages = (num_bytes + READ_AHEAD_BYTES) // HUGE_PAGE_BYTES + 2  # one for the rest, one to align
    memory = mmap.mmap(-1, num_pages * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    skipped = -address(whole) % HUGE_PAGE_BYTES
    return whole[skipped : skipped + num_bytes].view(dtype).reshape(shape)


def concatenated(parts: Sequence[Array]) -> Array:
    """Return the rows of arrays of one dtype, one after the other, in memory of their own."""
    first = parts[0]
    assert all(part.dtype == first.dtype for part in parts), f"rows of {[part.dtype for part in parts]}"
    whole = empty((sum(map(len, parts)), *first.shape[1:]), first.dtype)
    np.concatenate([bits(part) for part in parts], out=bits(whole))  # bits are copied at almost twice the speed
    return whole
