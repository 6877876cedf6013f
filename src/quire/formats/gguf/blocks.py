"""Quantized blocks of GGUF tensors: elements, one per byte, with the scales of their groups.

The extension reads them, and where it was not built PyTorch, as `reference` says. Bytes are arranged as in ggml's
structures of these names. A value is a float32 function of its element, in the order of
operations of ggml's dequantization: scale * (element - zero_point), scale * element - minimum, or
scale * codebook[element]. Scales are float32 products of a block's float16 scale with the small integer of a group.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.formats.gguf.gguf_file import GGML_TYPES
from quire.kernels.cpp.cpp_back_end import usable_isas

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

    bits: int  # of an element, 4 or 8
    elements: Tensor
    scales: Tensor
    zero_point: int = 0
    minimums: Tensor | None = None
    codebook: tuple[int, ...] | None = None

    @property
    def group_size(self) -> int:
        """Elements that share a scale."""
        return self.elements.shape[1] // self.scales.shape[1]

    def rows(self, start: int, stop: int) -> "WeightBlocks":
        """Return rows [start, stop), in the same memory."""
        parts = self.elements[start:stop], self.scales[start:stop]
        minimums = None if self.minimums is None else self.minimums[start:stop]
        return self._replace(elements=parts[0], scales=parts[1], minimums=minimums)

    def is_finite(self) -> bool:
        """Return whether no value is NaN or infinite."""
        largest = 2.0**self.bits if self.codebook is None else max(map(abs, self.codebook))
        bounds = self.scales.abs() * largest
        bounds = bounds if self.minimums is None else bounds + self.minimums.abs()
        return bool(bounds.isfinite().all())

    def values(self) -> Tensor:
        """Return the values, float32 [num_rows, width]."""
        grouped = self.elements.view(*self.scales.shape, self.group_size)
        if self.codebook is not None:
            numbers = torch.tensor(self.codebook, dtype=torch.float32)[grouped.int()]
        else:
            numbers = grouped.float() - self.zero_point
        products = numbers * self.scales[..., None]
        if self.minimums is not None:
            products -= self.minimums[..., None]
        return products.flatten(1)


def empty_blocks(type_name: str, num_rows: int, width: int) -> WeightBlocks:
    """Return blocks of rows of `width` elements, for `read_blocks` to fill."""
    layout, kind = _LAYOUTS[type_name], KINDS[type_name]
    grouped = num_rows, width // layout.block_size * kind.num_groups
    return WeightBlocks(
        kind.bits,
        torch.empty(num_rows, width, dtype=torch.uint8),
        torch.empty(grouped),
        kind.zero_point,
        torch.empty(grouped) if kind.has_minimums else None,
        kind.codebook,
    )


def read_blocks(type_name: str, rows: Tensor, out: WeightBlocks) -> bool:
    """Write the blocks in the bytes of some rows, uint8 [num_rows, bytes_per_row], to as many rows of `out`.

    `type_name` is one of KINDS. Return whether no value is NaN or infinite.
    """
    if not usable_isas():
        found = reference(type_name, rows)
        out.elements.copy_(found.elements)
        out.scales.copy_(found.scales)
        if out.minimums is not None and found.minimums is not None:
            out.minimums.copy_(found.minimums)
        return found.is_finite()
    from quire.kernels.cpp import _kernels  # noqa: PLC0415 (the extension is optional)

    places = out.elements.data_ptr(), out.scales.data_ptr(), 0 if out.minimums is None else out.minimums.data_ptr()
    return _kernels.read_blocks(*_rows_of_blocks(type_name, rows), *places)


def read_values(type_name: str, rows: Tensor) -> Tensor:
    """Return the values of the blocks in the bytes of some rows, float32 [num_rows, width]."""
    if not usable_isas():
        return reference(type_name, rows).values()
    from quire.kernels.cpp import _kernels  # noqa: PLC0415 (the extension is optional)

    layout = _LAYOUTS[type_name]
    values = torch.empty(len(rows), rows.shape[1] // layout.block_bytes * layout.block_size)
    _kernels.read_block_values(*_rows_of_blocks(type_name, rows), values.data_ptr())
    return values


def copy_blocks(type_name: str, rows: Tensor, out: Tensor) -> bool:
    """Copy the bytes of some rows, uint8 [num_rows, bytes_per_row], to `out`, without gaps.

    Return whether no value is NaN or infinite.
    """
    assert out.shape == rows.shape, f"{out.shape} for {rows.shape}"
    assert out.is_contiguous(), "a copy with gaps"
    if not usable_isas():
        return reference(type_name, out.copy_(rows)).is_finite()
    from quire.kernels.cpp import _kernels  # noqa: PLC0415 (the extension is optional)

    return _kernels.copy_blocks(*_rows_of_blocks(type_name, rows), out.data_ptr())


class BlockedTable:
    """An embedding table that stays in blocks; a `StoredTable`. Rows are expanded where they are looked up."""

    def __init__(self, type_name: str, rows: Tensor, dtype: torch.dtype) -> None:
        """`rows` as in `read_blocks`, without gaps and with finite values. dtype: that of looked-up rows."""
        assert rows.is_contiguous(), "rows with gaps"
        self._type_name, self._rows, self._dtype = type_name, rows, dtype

    @property
    def num_bytes(self) -> int:
        return self._rows.nbytes

    def look_up(self, token_ids: Tensor) -> Tensor:
        """Return rows [num_tokens, width] for token_ids [num_tokens] int64. An id past the table is an IndexError."""
        if not usable_isas():
            return reference(self._type_name, self._rows.index_select(0, token_ids)).values().to(self._dtype)
        from quire.kernels.cpp import _kernels  # noqa: PLC0415 (the extension is optional)

        assert token_ids.dtype == torch.int64, f"ids of {token_ids.dtype}"
        assert token_ids.is_contiguous(), "ids with gaps"
        block_type, place, _, num_rows, blocks_per_row = _rows_of_blocks(self._type_name, self._rows)
        values = torch.empty(len(token_ids), blocks_per_row * _LAYOUTS[self._type_name].block_size)
        ids = token_ids.data_ptr(), len(token_ids)
        _kernels.look_up_blocks(block_type, place, num_rows, blocks_per_row, *ids, values.data_ptr())
        return values.to(self._dtype)


def _rows_of_blocks(type_name: str, rows: Tensor) -> tuple[int, int, int, int, int]:
    """Return rows as the extension takes them."""
    from quire.kernels.cpp import _kernels  # noqa: PLC0415 (the extension is optional)

    num_rows, row_bytes = rows.shape
    assert rows.dtype == torch.uint8, f"bytes as {rows.dtype}"
    assert rows.stride(1) == 1, "bytes of a row with gaps"
    assert row_bytes % _LAYOUTS[type_name].block_bytes == 0, f"rows of {row_bytes} bytes, which are no whole blocks"
    stride, blocks_per_row = rows.stride(0), row_bytes // _LAYOUTS[type_name].block_bytes
    return _kernels.BLOCK_TYPES[type_name], rows.data_ptr(), stride, num_rows, blocks_per_row


def reference(type_name: str, rows: Tensor) -> WeightBlocks:
    """Return the blocks in the bytes of some rows: the meaning of `read_blocks`."""
    blocks = _READERS[type_name](rows.reshape(-1, _LAYOUTS[type_name].block_bytes))
    of_rows = blocks._replace(elements=blocks.elements.reshape(len(rows), -1),
                              scales=blocks.scales.reshape(len(rows), -1))
    return of_rows if blocks.minimums is None else of_rows._replace(minimums=blocks.minimums.reshape(len(rows), -1))


def _q4_0(blocks: Tensor) -> WeightBlocks:
    return WeightBlocks(4, _nibbles(blocks[:, 2:]), _halves(blocks[:, :2]), zero_point=8)


def _q4_1(blocks: Tensor) -> WeightBlocks:
    return WeightBlocks(4, _nibbles(blocks[:, 4:]), _halves(blocks[:, :2]), minimums=-_halves(blocks[:, 2:4]))


def _q5_0(blocks: Tensor) -> WeightBlocks:
    elements = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return WeightBlocks(8, elements, _halves(blocks[:, :2]), zero_point=16)


def _q5_1(blocks: Tensor) -> WeightBlocks:
    elements = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return WeightBlocks(8, elements, _halves(blocks[:, :2]), minimums=-_halves(blocks[:, 2:4]))


def _q8_0(blocks: Tensor) -> WeightBlocks:
    return WeightBlocks(8, blocks[:, 2:].contiguous().bitwise_xor_(0x80), _halves(blocks[:, :2]), zero_point=128)


def _q4_k(blocks: Tensor) -> WeightBlocks:
    return WeightBlocks(4, _nibbles(blocks[:, 16:], chunk=32), *_scales_and_minimums(blocks))


def _q5_k(blocks: Tensor) -> WeightBlocks:
    high = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1  # [num_blocks, 8, 32]
    return WeightBlocks(8, _nibbles(blocks[:, 48:], chunk=32) | high.flatten(1) << 4, *_scales_and_minimums(blocks))


def _q6_k(blocks: Tensor) -> WeightBlocks:
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    scales = _halves(blocks[:, 208:]) * blocks[:, 192:208].view(torch.int8).float()
    return WeightBlocks(8, _nibbles(blocks[:, :128], chunk=64) | high.flatten(1) << 4, scales, zero_point=32)


def _iq4_nl(blocks: Tensor) -> WeightBlocks:
    return WeightBlocks(4, _nibbles(blocks[:, 2:]), _halves(blocks[:, :2]), codebook=_IQ4_VALUES)


def _iq4_xs(blocks: Tensor) -> WeightBlocks:
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], dim=2)                    # [num_blocks, 4, 2]
    high = blocks[:, 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3             # [num_blocks, 2, 4]
    scales = (low.flatten(1) | high.flatten(1) << 4).float() - 32
    return WeightBlocks(4, _nibbles(blocks[:, 8:], chunk=16), _halves(blocks[:, :2]) * scales, codebook=_IQ4_VALUES)


def _mxfp4(blocks: Tensor) -> WeightBlocks:
    """Scales are powers of two: 2 ** (byte - 128)."""
    exponents = blocks[:, :1].int()
    bits = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    return WeightBlocks(4, _nibbles(blocks[:, 1:]), bits.int().view(torch.float32), codebook=_E2M1_VALUES)


_READERS: dict[str, Callable[[Tensor], WeightBlocks]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip


def _halves(pairs: Tensor) -> Tensor:
    """Return the float16 number of each two bytes [num_blocks, 2] as float32 [num_blocks, 1]."""
    return pairs.view(torch.float16).float()


def _nibbles(packed: Tensor, chunk: int = 0) -> Tensor:
    """Return the low halves of each `chunk` bytes, then their high halves; 0: of all bytes."""
    # Made contiguous first: torch takes a few bytes at a time of others.
    chunks = packed.contiguous().view(len(packed), -1, chunk or packed.shape[1])  # [num_blocks, num_chunks, chunk]
    return torch.stack([chunks & 15, chunks >> 4], dim=2).flatten(1)


def _bits(packed: Tensor) -> Tensor:
    """Return the bits of bytes [num_blocks, n], lowest first, [num_blocks, 8 n]."""
    return (packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _scales_and_minimums(blocks: Tensor) -> tuple[Tensor, int, Tensor]:
    """Return scales, zero point and minimums of the 8 groups of a Q4_K or Q5_K block.

    Bytes 4 to 15: the low 6 bits of the first and second four bytes are scales and minimums of groups 0 to 3; the last
    four bytes have the low 4 bits of those of groups 4 to 7, the high 2 bits are at the top of the first eight.
    """
    first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, last & 15 | first >> 6 << 4], dim=1)
    minimums = torch.cat([second & 63, last >> 4 | second >> 6 << 4], dim=1)
    return _halves(blocks[:, :2]) * scales.float(), 0, _halves(blocks[:, 2:4]) * minimums.float()
