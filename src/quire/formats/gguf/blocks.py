"""Quantized blocks of GGUF tensors: elements, one per byte, with the scales of their groups.

The extension reads them, and where it was not built NumPy, as `reference` says. Bytes are arranged as in ggml's
structures of these names. A value is a float32 function of its element, in the order of
operations of ggml's dequantization: scale * (element - zero_point), scale * element - minimum, or
scale * codebook[element]. Scales are float32 products of a block's float16 scale with the small integer of a group.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from quire.core.arrays import FLOAT32, INT64, UINT8, Array, DType, address, empty
from quire.extension.isas import usable_isas
from quire.formats.gguf.gguf_file import GGML_TYPES
from quire.kernels.conversion import converted

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the numbers of 4 bits, scales are half
_LAYOUTS = {kind.name: kind for kind in GGML_TYPES.values()}


class Kind(NamedTuple):
    """Elements and groups of a block of a type; fields as those of `WeightBlocks`."""

    bits: int
    zero_point: int = 0
    has_minimums: bool = False
    codebook: tuple[int, ...] | None = None
    num_groups: int = 1


KINDS = {
    "Q4_0": Kind(4, zero_point=8),
    "Q4_1": Kind(4, has_minimums=True),
    "Q5_0": Kind(8, zero_point=16),
    "Q5_1": Kind(8, has_minimums=True),
    "Q8_0": Kind(8, zero_point=128),
    "Q4_K": Kind(4, has_minimums=True, num_groups=8),
    "Q5_K": Kind(8, has_minimums=True, num_groups=8),
    "Q6_K": Kind(8, zero_point=32, num_groups=16),
    "IQ4_NL": Kind(4, codebook=_IQ4_VALUES),
    "IQ4_XS": Kind(4, codebook=_IQ4_VALUES, num_groups=8),
    "MXFP4": Kind(4, codebook=_E2M1_VALUES),
}


class WeightBlocks(NamedTuple):
    """Rows of a quantized tensor. Element [row, i] has the scale and minimum [row, i // group_size].

    elements uint8 [num_rows, width], below 16 unless `bits` is 8; scales and minimums float32 [num_rows, num_groups].
    Codes have a codebook of 16 integers; others a zero point, or minimums instead.
    """

    bits: int  # bits per element, 4 or 8
    elements: Array
    scales: Array
    zero_point: int = 0
    minimums: Array | None = None
    codebook: tuple[int, ...] | None = None

    @property
    def group_size(self) -> int:
        """Elements that share a scale."""
        return int(self.elements.shape[1] // self.scales.shape[1])

    def rows(self, start: int, stop: int) -> "WeightBlocks":
        """Return rows [start, stop), in the same memory."""
        parts = self.elements[start:stop], self.scales[start:stop]
        minimums = None if self.minimums is None else self.minimums[start:stop]
        return self._replace(elements=parts[0], scales=parts[1], minimums=minimums)

    def is_finite(self) -> bool:
        """Return whether no value is NaN or infinite."""
        largest = 2.0**self.bits if self.codebook is None else max(map(abs, self.codebook))
        with np.errstate(over="ignore", invalid="ignore"):
            bounds = np.abs(self.scales) * np.float32(largest)
            bounds = bounds if self.minimums is None else bounds + np.abs(self.minimums)
        return bool(np.isfinite(bounds).all())

    def values(self) -> Array:
        """Return the values, float32 [num_rows, width]."""
        grouped = self.elements.reshape(*self.scales.shape, self.group_size)
        if self.codebook is not None:
            numbers = np.array(self.codebook, np.float32)[grouped]
        else:
            numbers = grouped.astype(np.float32) - np.float32(self.zero_point)
        with np.errstate(over="ignore", invalid="ignore"):
            products = numbers * self.scales[..., None]
            if self.minimums is not None:
                products -= self.minimums[..., None]
        return products.reshape(len(self.elements), -1)


def empty_blocks(type_name: str, num_rows: int, width: int) -> WeightBlocks:
    """Return blocks of rows of `width` elements, for `read_blocks` to fill."""
    layout, kind = _LAYOUTS[type_name], KINDS[type_name]
    grouped = num_rows, width // layout.block_size * kind.num_groups
    return WeightBlocks(
        kind.bits,
        empty((num_rows, width), UINT8),
        np.empty(grouped, FLOAT32),
        kind.zero_point,
        np.empty(grouped, FLOAT32) if kind.has_minimums else None,
        kind.codebook,
    )


def read_blocks(type_name: str, rows: Array, out: WeightBlocks) -> bool:
    """Write the blocks in the bytes of some rows, uint8 [num_rows, bytes_per_row], to as many rows of `out`.

    `type_name` is one of KINDS. Return whether no value is NaN or infinite.
    """
    if not usable_isas():
        found = reference(type_name, rows)
        out.elements[...], out.scales[...] = found.elements, found.scales
        if out.minimums is not None and found.minimums is not None:
            out.minimums[...] = found.minimums
        return found.is_finite()
    from quire.extension import _kernels  # noqa: PLC0415 (the extension is optional)

    places = address(out.elements), address(out.scales), address(out.minimums)
    return _kernels.read_blocks(*_rows_of_blocks(type_name, rows), *places)


def read_values(type_name: str, rows: Array) -> Array:
    """Return the values of the blocks in the bytes of some rows, float32 [num_rows, width]."""
    if not usable_isas():
        return reference(type_name, rows).values()
    from quire.extension import _kernels  # noqa: PLC0415 (the extension is optional)

    layout = _LAYOUTS[type_name]
    values = np.empty((len(rows), rows.shape[1] // layout.block_bytes * layout.block_size), FLOAT32)
    _kernels.read_block_values(*_rows_of_blocks(type_name, rows), address(values))
    return values


def copy_blocks(type_name: str, rows: Array, out: Array) -> bool:
    """Copy the bytes of some rows, uint8 [num_rows, bytes_per_row], to `out`, without gaps.

    Return whether no value is NaN or infinite.
    """
    assert out.shape == rows.shape, f"{out.shape} for {rows.shape}"
    assert out.flags.c_contiguous, "a copy with gaps"
    if not usable_isas():
        out[...] = rows
        return reference(type_name, out).is_finite()
    from quire.extension import _kernels  # noqa: PLC0415 (the extension is optional)

    return _kernels.copy_blocks(*_rows_of_blocks(type_name, rows), address(out))


class BlockedTable:
    """An embedding table that stays in blocks; a `StoredTable`. Rows are expanded where they are looked up."""

    def __init__(self, type_name: str, rows: Array, dtype: DType) -> None:
        """`rows` as in `read_blocks`, without gaps and with finite values. dtype: that of looked-up rows."""
        assert rows.flags.c_contiguous, "rows with gaps"
        self._type_name, self._rows, self._dtype = type_name, rows, dtype

    @property
    def num_bytes(self) -> int:
        return self._rows.nbytes

    @property
    def stored(self) -> tuple[str, Array]:
        return self._type_name, self._rows

    def look_up(self, token_ids: Array) -> Array:
        """Return rows [num_tokens, width] for token_ids [num_tokens] int64. An id past the table is an IndexError."""
        if not usable_isas():
            if (token_ids < 0).any():
                raise IndexError(f"a row of {token_ids.min()}")
            return converted(reference(self._type_name, self._rows[token_ids]).values(), self._dtype)
        from quire.extension import _kernels  # noqa: PLC0415 (the extension is optional)

        assert token_ids.dtype == INT64, f"ids of {token_ids.dtype}"
        assert token_ids.flags.c_contiguous, "ids with gaps"
        block_type, place, _, num_rows, blocks_per_row = _rows_of_blocks(self._type_name, self._rows)
        values = np.empty((len(token_ids), blocks_per_row * _LAYOUTS[self._type_name].block_size), FLOAT32)
        ids = address(token_ids), len(token_ids)
        _kernels.look_up_blocks(block_type, place, num_rows, blocks_per_row, *ids, address(values))
        return converted(values, self._dtype)


def _rows_of_blocks(type_name: str, rows: Array) -> tuple[int, int, int, int, int]:
    """Return rows as the extension takes them."""
    from quire.extension import _kernels  # noqa: PLC0415 (the extension is optional)

    num_rows, row_bytes = rows.shape
    assert rows.dtype == UINT8, f"bytes as {rows.dtype}"
    assert rows.strides[1] == 1, "bytes of a row with gaps"
    assert row_bytes % _LAYOUTS[type_name].block_bytes == 0, f"rows of {row_bytes} bytes, which are no whole blocks"
    stride, blocks_per_row = rows.strides[0], row_bytes // _LAYOUTS[type_name].block_bytes
    return _kernels.BLOCK_TYPES[type_name], address(rows), stride, num_rows, blocks_per_row


@np.errstate(over="ignore", invalid="ignore")  # scales may be no numbers
def reference(type_name: str, rows: Array) -> WeightBlocks:
    """Return the blocks in the bytes of some rows: the meaning of `read_blocks`."""
    blocks = _READERS[type_name](rows.reshape(-1, _LAYOUTS[type_name].block_bytes))
    of_rows = blocks._replace(elements=blocks.elements.reshape(len(rows), -1),
                              scales=blocks.scales.reshape(len(rows), -1))
    return of_rows if blocks.minimums is None else of_rows._replace(minimums=blocks.minimums.reshape(len(rows), -1))


def _q4_0(blocks: Array) -> WeightBlocks:
    return WeightBlocks(4, _nibbles(blocks[:, 2:]), _halves(blocks[:, :2]), zero_point=8)


def _q4_1(blocks: Array) -> WeightBlocks:
    return WeightBlocks(4, _nibbles(blocks[:, 4:]), _halves(blocks[:, :2]), minimums=-_halves(blocks[:, 2:4]))


def _q5_0(blocks: Array) -> WeightBlocks:
    elements = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return WeightBlocks(8, elements, _halves(blocks[:, :2]), zero_point=16)


def _q5_1(blocks: Array) -> WeightBlocks:
    elements = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return WeightBlocks(8, elements, _halves(blocks[:, :2]), minimums=-_halves(blocks[:, 2:4]))


def _q8_0(blocks: Array) -> WeightBlocks:
    return WeightBlocks(8, blocks[:, 2:] ^ 0x80, _halves(blocks[:, :2]), zero_point=128)


def _q4_k(blocks: Array) -> WeightBlocks:
    return WeightBlocks(4, _nibbles(blocks[:, 16:], chunk=32), *_scales_and_minimums(blocks))


def _q5_k(blocks: Array) -> WeightBlocks:
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # [num_blocks, 8, 32]
    return WeightBlocks(8, _nibbles(blocks[:, 48:], chunk=32) | _flat(high) << 4, *_scales_and_minimums(blocks))


def _q6_k(blocks: Array) -> WeightBlocks:
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    scales = _halves(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return WeightBlocks(8, _nibbles(blocks[:, :128], chunk=64) | _flat(high) << 4, scales, zero_point=32)


def _iq4_nl(blocks: Array) -> WeightBlocks:
    return WeightBlocks(4, _nibbles(blocks[:, 2:]), _halves(blocks[:, :2]), codebook=_IQ4_VALUES)


def _iq4_xs(blocks: Array) -> WeightBlocks:
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2)                # [num_blocks, 4, 2]
    high = blocks[:, 2:4, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3             # [num_blocks, 2, 4]
    scales = (_flat(low) | _flat(high) << 4).astype(np.float32) - 32
    return WeightBlocks(4, _nibbles(blocks[:, 8:], chunk=16), _halves(blocks[:, :2]) * scales, codebook=_IQ4_VALUES)


def _mxfp4(blocks: Array) -> WeightBlocks:
    """Scales are powers of two: 2 ** (byte - 128)."""
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return WeightBlocks(4, _nibbles(blocks[:, 1:]), scales, codebook=_E2M1_VALUES)


_READERS: dict[str, Callable[[Array], WeightBlocks]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip


def _halves(pairs: Array) -> Array:
    """Return the float16 number of each two bytes [num_blocks, 2] as float32 [num_blocks, 1]."""
    return pairs.view(np.float16).astype(np.float32)


def _nibbles(packed: Array, chunk: int = 0) -> Array:
    """Return the low halves of each `chunk` bytes, then their high halves; 0: of all bytes."""
    chunks = packed.reshape(len(packed), -1, chunk or packed.shape[1])  # [num_blocks, num_chunks, chunk]
    return _flat(np.stack([chunks & 15, chunks >> 4], axis=2))


def _flat(nested: Array) -> Array:
    """Return [num_blocks, all others]."""
    return nested.reshape(len(nested), -1)


def _bits(packed: Array) -> Array:
    """Return the bits of bytes [num_blocks, n], lowest first, [num_blocks, 8 n]."""
    return _flat(packed[..., None] >> np.arange(8, dtype=np.uint8) & 1)


def _scales_and_minimums(blocks: Array) -> tuple[Array, int, Array]:
    """Return scales, zero point and minimums of the 8 groups of a Q4_K or Q5_K block.

    Bytes 4 to 15: the low 6 bits of the first and second four bytes are scales and minimums of groups 0 to 3; the last
    four bytes have the low 4 bits of those of groups 4 to 7, the high 2 bits are at the top of the first eight.
    """
    first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, last & 15 | first >> 6 << 4], axis=1)
    minimums = np.concatenate([second & 63, last >> 4 | second >> 6 << 4], axis=1)
    return _halves(blocks[:, :2]) * scales.astype(np.float32), 0, _halves(blocks[:, 2:4]) * minimums.astype(np.float32)
