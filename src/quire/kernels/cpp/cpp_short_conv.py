"""Gated short convolution in C++; the meaning is that of `quire.kernels.reference.short_conv`."""

import numpy as np
from numpy.typing import NDArray

from quire.core.arrays import Array, DType
from quire.kernels.conversion import converted
from quire.kernels.cpp.dtypes import address, kernel_dtype, pair
from quire.kernels.paged_attention import AttentionMetadata
from quire.kernels.short_conv import ShortConvSpec

_KERNELS = pair("short_conv")


def short_conv(
    spec: ShortConvSpec, x: Array, positions: NDArray[np.int64], tails: Array, slot_mapping: NDArray[np.int64],
    metadata: AttentionMetadata,
) -> Array:  # fmt: skip
    """Do what the reference does; tails in the dtype that the kernels compute x in."""
    dtype, num_tokens = kernel_dtype(x.dtype), metadata.num_tokens
    rows = np.ascontiguousarray(converted(x, dtype))
    assert rows.shape == (num_tokens, 3 * spec.width), f"{rows.shape} for {num_tokens} tokens of width {spec.width}"
    assert positions.dtype == slot_mapping.dtype == np.int64
    assert len(positions) == len(slot_mapping) == num_tokens
    tables, starts = metadata.block_tables, metadata.query_starts
    assert tables.dtype == starts.dtype == np.int32, "int32 tables"
    out = np.empty((num_tokens, spec.width), dtype)
    _KERNELS[dtype](
        address(rows), 3 * spec.width, address(out), spec.width, *convolution_arguments(spec), spec.width,
        address(checked_tails(spec, tails, metadata.block_size, dtype)), spec.length, address(positions),
        address(slot_mapping), address(tables), address(starts), tables.strides[0] // tables.itemsize,
        len(starts) - 1, metadata.block_size,
    )  # fmt: skip
    return converted(out, x.dtype)


def convolution_arguments(spec: ShortConvSpec) -> tuple[int, int, int]:
    """Return the kernel's arguments from a layer's weights: weight, bias, taps. The spec keeps their memory."""
    assert spec.weight.flags.c_contiguous, "weights with gaps"
    return address(spec.weight), address(spec.bias), spec.taps


def checked_tails(spec: ShortConvSpec, tails: Array, block_size: int, dtype: DType) -> Array:
    """Return the tails of a layer; assert that they are as the kernel takes them."""
    expected = min(spec.length, block_size), spec.width
    assert tails.shape[1:] == expected, f"tails {tails.shape} for {expected}"
    assert tails.dtype == dtype, f"tails of {tails.dtype} for kernels of {dtype}"
    assert tails.flags.c_contiguous, "tails with gaps"
    return tails
