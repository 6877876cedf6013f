"""Packed weights of linear layers: strips of 16 outputs, laid out as csrc/packing.hpp says, on huge pages."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from quire.core.arrays import UINT8, Array, DType, concatenated, empty
from quire.kernels.conversion import converted
from quire.kernels.cpp import _kernels
from quire.kernels.cpp.dtypes import address, pair, row_stride
from quire.kernels.linear_weight import DENSE, LinearWeight

STRIP_ROWS = 16
ALIGNMENT = 64             # bytes: a cache line
MAPPED_AT_ONCE = 64 << 20  # bytes; none is used before it is written to
_PACK, _PACKED_SIZE = pair("pack"), pair("packed_size")


class PackedMemory:
    """Memory of packed weights, one after the other, so that small ones share a huge page too.

    A mapping is returned to the system when the last weight in it is freed.
    """

    def __init__(self) -> None:
        self._free = empty(0, UINT8)

    def take(self, num_elements: int, dtype: DType) -> Array:
        """Return memory for a packed weight, [num_elements]."""
        num_bytes = num_elements * dtype.itemsize
        if num_bytes > len(self._free):
            self._free = empty(max(num_bytes, MAPPED_AT_ONCE), UINT8)
        taken, self._free = self._free[:num_bytes], self._free[num_bytes + -num_bytes % ALIGNMENT :]
        return taken.view(dtype)


class PackedWeight(NamedTuple):
    """A packed weight, and how the extension is to take it."""

    packed: Array
    format: tuple[int, _kernels.Quantization]
    kept: tuple[Array | None, ...] = ()  # `format` has their addresses


def kernel_format(weight: LinearWeight) -> str:
    """Return the name of a weight's format and arithmetic in WEIGHT_FORMATS."""
    return f"{weight.format}_a8" if weight.activation_group_size else weight.format


def pack(weight: LinearWeight, dtype: DType, num_layers: int, memory: PackedMemory) -> PackedWeight:
    """Return a weight packed into `memory`, a dense one in `dtype`; the strips of two layers alternate."""
    if weight.format == DENSE:
        return _pack_dense([converted(part, dtype) for part in weight.dense_parts()], num_layers, memory)
    if weight.activation_group_size:
        return _pack_quantized(weight, num_layers, memory)
    return _pack_expanded(weight, num_layers, memory)


def _pack_dense(parts: Sequence[Array], num_layers: int, memory: PackedMemory) -> PackedWeight:
    layer_rows, width, dtype = sum(map(len, parts)) // num_layers, parts[0].shape[1], parts[0].dtype
    packed = memory.take(num_layers * _PACKED_SIZE[dtype](layer_rows, width), dtype)

    def pack_piece(piece: Array, row: int, place: Array) -> None:
        _PACK[dtype](address(piece), row_stride(piece), *piece.shape, address(place), num_layers)

    _pack_pieces(parts, num_layers, packed, _PACKED_SIZE[dtype](1, width), pack_piece)
    tag = _kernels.WEIGHT_FORMATS[DENSE]
    return PackedWeight(packed, (tag, _kernels.Quantization(0, _kernels.Offsets.zero_point, 0, 0, 0, 0)))


def _pack_quantized(weight: LinearWeight, num_layers: int, memory: PackedMemory) -> PackedWeight:
    """Return a weight of integers for int8 activations: its groups are those of the activations."""
    weight, long_order = in_group_order(weight)
    order = None if long_order is None else long_order.astype(np.int32)
    quantization = _quantization(weight, weight.activation_group_size, order=order)
    kernel = _kernels.WEIGHT_FORMATS[kernel_format(weight)], quantization
    pack, scales_at = _kernels.pack_quantized, (weight.num_groups, min(weight.group_size, weight.in_features))
    packed = _pack_strips(weight, kernel, num_layers, memory, _kernels.quantized_size, pack, scales_at)
    return PackedWeight(packed, kernel, (order,))


def in_group_order(weight: LinearWeight) -> tuple[LinearWeight, Array | None]:
    """Return a weight with groups of consecutive inputs, and the order int64 [in_features] in which it has the inputs.

    The order is None where groups are consecutive already. Groups keep their sizes, which must be those of consecutive
    ones.
    """
    if weight.group_index is None:
        return weight, None
    order = np.argsort(weight.group_index, kind="stable")
    consecutive = np.arange(weight.in_features) // weight.group_size
    assert np.array_equal(weight.group_index[order], consecutive), "groups of other sizes than consecutive ones"
    return replace(weight, data=tuple(part[:, order] for part in weight.data), group_index=None), order


def _pack_expanded(weight: LinearWeight, num_layers: int, memory: PackedMemory) -> PackedWeight:
    """Return a weight that is expanded while it is multiplied: its inputs keep their order, and so do sums."""
    groups = None if weight.group_index is None else np.ascontiguousarray(weight.group_index)
    assert groups is None or 0 <= groups.min() <= groups.max() < weight.num_groups, "an input of no group"
    codebook = weight.codebook
    if codebook is not None:
        codebook = np.where(np.isnan(codebook), np.float32(np.nan), codebook)
    quantization = _quantization(weight, weight.group_size, groups=groups, codebook=codebook)
    kernel = _kernels.WEIGHT_FORMATS[kernel_format(weight)], quantization
    packed = _pack_strips(weight, kernel, num_layers, memory, _kernels.expanded_size, _kernels.pack_expanded)
    return PackedWeight(packed, kernel, (groups, codebook))


def _pack_strips(
    weight: LinearWeight,
    kernel: tuple[int, _kernels.Quantization],
    num_layers: int,
    memory: PackedMemory,
    size: Callable[..., int],
    pack: Callable[..., None],
    scales_at: tuple[int, ...] = (),
) -> Array:
    """Return the strips of a quantized weight. `size` and `pack` are of the extension, as is `scales_at` for `pack`."""
    scales, offsets = _headers(weight)
    layer_rows, width = weight.out_features // num_layers, weight.in_features
    packed = memory.take(num_layers * size(*kernel, layer_rows, width), UINT8)

    def pack_piece(piece: Array, row: int, place: Array) -> None:
        rows = address(piece), row_stride(piece), len(piece), width
        headers = address(scales[row:]), address(None if offsets is None else offsets[row:])
        pack(*kernel, *rows, *headers, *scales_at, address(place), num_layers)

    _pack_pieces(weight.data, num_layers, packed, size(*kernel, 1, width), pack_piece)
    return packed


def _headers(weight: LinearWeight) -> tuple[Array, Array | None]:
    """Return the scales, and the zero points or minimums unless one zero point serves all."""
    assert weight.scales is not None
    offsets = weight.zero_points if isinstance(weight.zero_points, np.ndarray) else weight.minimums
    return np.ascontiguousarray(weight.scales), None if offsets is None else np.ascontiguousarray(offsets)


def _quantization(
    weight: LinearWeight,
    group_size: int,
    *,
    order: Array | None = None,
    groups: Array | None = None,
    codebook: Array | None = None,
) -> _kernels.Quantization:
    offsets, zero = _kernels.Offsets.zero_point, 0
    if weight.minimums is not None:
        offsets = _kernels.Offsets.minimums
    elif isinstance(weight.zero_points, np.ndarray):
        offsets = _kernels.Offsets.zero_points
    elif weight.zero_points is not None:
        zero = weight.zero_points
    size = min(group_size, weight.in_features)
    return _kernels.Quantization(size, offsets, zero, address(order), address(groups), address(codebook))


def _pack_pieces(
    parts: Sequence[Array],
    num_layers: int,
    packed: Array,
    strip_size: int,
    pack_piece: Callable[[Array, int, Array], None],
) -> None:
    """Call pack_piece(rows, the first one's number in the weight, their place in `packed`) for all parts.

    A part is packed directly into its strips of `strip_size` elements, unless one begins in the middle of a strip.
    """
    layer_rows = sum(map(len, parts)) // num_layers
    places = _places(parts, layer_rows)
    if any(first_row % STRIP_ROWS for _, first_row, _ in places):
        places = _places([concatenated(list(parts))], layer_rows)
    for layer, first_row, piece in places:
        place = packed[(first_row // STRIP_ROWS * num_layers + layer) * strip_size :]
        pack_piece(np.ascontiguousarray(piece), layer * layer_rows + first_row, place)


def _places(parts: Sequence[Array], layer_rows: int) -> list[tuple[int, int, Array]]:
    """Cut parts where a layer ends; return the layer of each piece, its first row in there, and the piece."""
    places, row = [], 0
    for part in parts:
        rest = part
        while len(rest):
            layer, first_row = divmod(row, layer_rows)
            piece, rest = rest[: layer_rows - first_row], rest[layer_rows - first_row :]
            places.append((layer, first_row, piece))
            row += len(piece)
    return places
