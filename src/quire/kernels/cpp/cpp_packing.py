"""Packed weights of linear layers: strips of 16 outputs, laid out as csrc/packing.hpp says, on huge pages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quire.core.arrays import FLOAT32, INT32, INT64, UINT8, Array, DType, concatenated, empty
from quire.extension import _kernels
from quire.kernels.conversion import converted
from quire.kernels.cpp.dtypes import address, kernel_dtype, pair, row_stride
from quire.kernels.linear_weight import CODEBOOK4, DENSE, STRIP_ROWS, LinearWeight, WeightPortions

PACKING_VERSION = 2  # one more whenever a weight is packed, or read before that, into other bytes: files keep them
ALIGNMENT = 64             # bytes: a cache line
MAPPED_AT_ONCE = 64 << 20  # bytes; none is used before it is written to
_PACK, _PACKED_SIZE, _LOOK_UP = pair("pack"), pair("packed_size"), pair("look_up_packed")
_INT8_ACTIVATIONS = "_a8"  # ends the names of formats that are multiplied with int8 activations
_OFFSETS = ("zero_point", "zero_points", "minimums")


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


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed weight, [out_features, in_features], and what a kernel needs to know of it; 0 or None where it has none.

    A kernel's groups are those of `LinearWeight`, or with int8 activations those of the activations.
    """

    packed: Array                 # strips: the kernel's dtype of a dense weight, else uint8
    kernel: str                   # a name of WEIGHT_FORMATS
    out_features: int
    in_features: int
    value_dtype: DType            # as `LinearWeight.value_dtype`
    group_size: int = 0
    offsets: str = "zero_point"   # a name of the extension's Offsets
    zero_point: int = 0           # one for all groups
    order: Array | None = None    # int32 [in_features], the inputs in the weight's order
    groups: Array | None = None   # int32 [in_features], the group of each input
    codebook: Array | None = None  # float32 [16]

    @property
    def format(self) -> tuple[int, _kernels.Quantization]:
        """The format as the extension takes it, with addresses of the weight's arrays."""
        offsets, found = getattr(_kernels.Offsets, self.offsets), (self.order, self.groups, self.codebook)
        quantization = _kernels.Quantization(self.group_size, offsets, self.zero_point, *map(address, found))
        return _kernels.WEIGHT_FORMATS[self.kernel], quantization

    def num_elements(self, num_layers: int) -> int:
        """Return the elements that `packed` must have."""
        rows, width = self.out_features // num_layers, self.in_features
        if self.kernel == DENSE:
            dense_size: int = _PACKED_SIZE[self.packed.dtype](rows, width)
            return num_layers * dense_size
        size = _kernels.quantized_size if self.kernel.endswith(_INT8_ACTIVATIONS) else _kernels.expanded_size
        return num_layers * size(*self.format, rows, width)

    def is_sound(self, num_layers: int) -> bool:
        """Return whether a kernel can multiply by a weight that was not packed here: it reads only what is there."""
        dtype = kernel_dtype(self.value_dtype) if self.kernel == DENSE else UINT8
        if self.kernel not in _kernels.WEIGHT_FORMATS or self.packed.dtype != dtype or self.out_features % num_layers:
            return False
        has_groups = self.group_size == 0 if self.kernel == DENSE else 1 <= self.group_size <= self.in_features
        if not has_groups or self.offsets not in _OFFSETS:
            return False
        num_groups = -(-self.in_features // max(self.group_size, 1))
        return (
            0 <= self.zero_point <= 255
            and (self.codebook is not None) == (self.kernel == CODEBOOK4)
            and (self.codebook is None or (self.codebook.dtype, self.codebook.shape) == (FLOAT32, (16,)))
            and self._are_below(self.order, self.in_features)
            and self._are_below(self.groups, num_groups)
            and self.packed.shape == (self.num_elements(num_layers),)
        )

    def _are_below(self, numbers: Array | None, limit: int) -> bool:
        if numbers is None:
            return True
        is_of_inputs = (numbers.dtype, numbers.shape) == (INT32, (self.in_features,))
        return is_of_inputs and bool(((numbers >= 0) & (numbers < limit)).all())


class PackedTable:
    """An embedding table that is the packed weight of a tied head; a `StoredTable`."""

    def __init__(self, weight: PackedWeight) -> None:
        assert weight.order is None, "a table with inputs in another order"
        self._weight = weight

    @property
    def num_bytes(self) -> int:
        return self._weight.packed.nbytes

    @property
    def stored(self) -> tuple[str, Array]:
        return self._weight.kernel, self._weight.packed

    def look_up(self, token_ids: Array) -> Array:
        """Return rows [num_tokens, width] for token_ids [num_tokens] int64. An id past the table is an IndexError."""
        weight, at = self._weight, _kernels.address
        assert (token_ids.dtype, token_ids.flags.c_contiguous) == (INT64, True), "ids of another form"
        dtype = weight.packed.dtype if weight.kernel == DENSE else FLOAT32
        rows = np.empty((len(token_ids), weight.in_features), dtype)
        places = at(weight.packed), weight.out_features, weight.in_features, at(token_ids), len(token_ids), at(rows)
        if weight.kernel == DENSE:
            _LOOK_UP[dtype](*places)
        elif weight.kernel.endswith(_INT8_ACTIVATIONS):
            _kernels.look_up_quantized(*weight.format, *places)
        else:
            _kernels.look_up_expanded(*weight.format, *places)
        return rows if dtype == weight.value_dtype else converted(rows, weight.value_dtype)


def kernel_format(weight: LinearWeight) -> str:
    """Return the name of a weight's format and arithmetic in WEIGHT_FORMATS."""
    return f"{weight.format}{_INT8_ACTIVATIONS}" if weight.activation_group_size else weight.format


def pack(weight: LinearWeight, dtype: DType, num_layers: int, memory: PackedMemory) -> PackedWeight:
    """Return a weight packed into `memory`, a dense one in `dtype`; the strips of two layers alternate."""
    if weight.format == DENSE:
        return _pack_dense(weight, dtype, num_layers, memory)
    return _pack_quantized(weight, num_layers, memory)


def _pack_dense(weight: LinearWeight, dtype: DType, num_layers: int, memory: PackedMemory) -> PackedWeight:
    parts = [converted(part, dtype) for part in weight.dense_parts()]
    layer_rows, width = weight.out_features // num_layers, weight.in_features
    packed = memory.take(num_layers * _PACKED_SIZE[dtype](layer_rows, width), dtype)

    def pack_piece(piece: Array, row: int, place: Array) -> None:
        _PACK[dtype](address(piece), row_stride(piece), *piece.shape, address(place), num_layers)

    _pack_pieces(parts, num_layers, packed, _PACKED_SIZE[dtype](1, width), pack_piece)
    return PackedWeight(packed, DENSE, weight.out_features, width, weight.value_dtype)


def _pack_quantized(weight: LinearWeight, num_layers: int, memory: PackedMemory) -> PackedWeight:
    form = _packed_form(weight)
    packed = memory.take(form.made.num_elements(num_layers), UINT8)
    form.pack(num_layers, packed)
    return replace(form.made, packed=packed)


def pack_portions(weight: WeightPortions, memory: PackedMemory) -> PackedWeight:
    """Return a weight of one layer packed into `memory`, each portion before the next is read."""
    made, row = None, 0
    for portion in weight.portions:
        form = _packed_form(portion)
        if made is None:
            made = replace(form.made, out_features=weight.out_features)
            made = replace(made, packed=memory.take(made.num_elements(1), UINT8))
        assert row % STRIP_ROWS == 0, f"a portion from row {row} on"
        form.pack(1, made.packed[len(made.packed) // num_strips(weight.out_features) * (row // STRIP_ROWS) :])
        row += portion.out_features
    assert made is not None, "a weight without rows"
    assert row == weight.out_features, f"{row} rows of {weight.out_features}"
    return made


@dataclass(frozen=True, slots=True)
class _PackedForm:
    """A quantized weight with its inputs in the order in which they are packed, and what is made of it, without strips.

    `pack_strips` is of the extension, as is `scales_at` for it.
    """

    weight: LinearWeight
    made: PackedWeight
    pack_strips: Callable[..., None]
    scales_at: tuple[int, ...] = ()

    def pack(self, num_layers: int, packed: Array) -> None:
        """Pack all rows into the strips that begin at `packed`."""
        weight, kernel = self.weight, self.made.format
        scales, offsets = _headers(weight)

        def pack_piece(piece: Array, row: int, place: Array) -> None:
            rows = address(piece), row_stride(piece), len(piece), weight.in_features
            headers = address(scales[row:]), address(None if offsets is None else offsets[row:])
            self.pack_strips(*kernel, *rows, *headers, *self.scales_at, address(place), num_layers)

        strips = num_layers * num_strips(weight.out_features // num_layers)
        _pack_pieces(weight.data, num_layers, packed, self.made.num_elements(num_layers) // strips, pack_piece)


def num_strips(num_rows: int) -> int:
    """Return the strips of so many outputs."""
    return -(-num_rows // STRIP_ROWS)


def _packed_form(weight: LinearWeight) -> _PackedForm:
    """Return how a weight is packed.

    For int8 activations its groups are those of the activations; if it is expanded while it is multiplied, its inputs
    keep their order, and so do sums.
    """
    if weight.activation_group_size:
        weight, long_order = in_group_order(weight)
        order = None if long_order is None else long_order.astype(np.int32)
        made = replace(_unpacked(weight, weight.activation_group_size), order=order)
        scales_at = weight.num_groups, min(weight.group_size, weight.in_features)
        return _PackedForm(weight, made, _kernels.pack_quantized, scales_at)
    groups = None if weight.group_index is None else np.ascontiguousarray(weight.group_index)
    assert groups is None or 0 <= groups.min() <= groups.max() < weight.num_groups, "an input of no group"
    codebook = weight.codebook
    if codebook is not None:
        codebook = np.where(np.isnan(codebook), np.float32(np.nan), codebook)
    made = replace(_unpacked(weight, weight.group_size), groups=groups, codebook=codebook)
    return _PackedForm(weight, made, _kernels.pack_expanded)


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


def _headers(weight: LinearWeight) -> tuple[Array, Array | None]:
    """Return the scales, and the zero points or minimums unless one zero point serves all."""
    assert weight.scales is not None
    offsets = weight.zero_points if isinstance(weight.zero_points, np.ndarray) else weight.minimums
    return np.ascontiguousarray(weight.scales), None if offsets is None else np.ascontiguousarray(offsets)


def _unpacked(weight: LinearWeight, group_size: int) -> PackedWeight:
    """Return what a kernel in groups of `group_size` needs to know of a quantized weight, without its strips."""
    offsets, zero_point = "zero_point", 0
    if weight.minimums is not None:
        offsets = "minimums"
    elif isinstance(weight.zero_points, np.ndarray):
        offsets = "zero_points"
    elif weight.zero_points is not None:
        zero_point = weight.zero_points
    return PackedWeight(
        np.empty(0, UINT8), kernel_format(weight), weight.out_features, weight.in_features, weight.value_dtype,
        min(group_size, weight.in_features), offsets, zero_point,
    )  # fmt: skip


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
