"""Tensors of quantized checkpoints as stored: scales, and integers packed into words."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from quire.core.arrays import FLOAT8_E8M0, FLOAT32, Array, bits
from quire.formats.quantized.schemes import StoredScheme
from quire.kernels.conversion import converted
from quire.model.checkpoints.tensor_reader import FLOAT_DTYPES, TensorReader
from quire.model.weight_formats.weight_format import ModuleRows

WORD_BITS = 32
EXPONENT_BIAS, MAX_EXPONENT, NAN_EXPONENT = 127, 127 + 96, 255  # scales that are powers of two
MAX_SCALE = 1e30  # far past any weight; products with elements of a byte stay finite in float32 and bfloat16
BITS = {"int4": 4, "int8": 8, "codebook4": 4, "fp8": 8}
SCALE_DTYPES = (*FLOAT_DTYPES, "F8_E8M0", "F8_E4M3")
GLOBAL_SCALE = "weight_global_scale"


class StoredModule(NamedTuple):
    """Outputs of a quantized module to read: the tensors are named `{rows.module}.` and as the format says."""

    tensors: TensorReader
    scheme: StoredScheme
    rows: ModuleRows
    width: int

    def name(self, tensor: str) -> str:
        """Return the full name of a tensor of the module."""
        return f"{self.rows.module}.{tensor}"

    @property
    def bits(self) -> int:
        """Bits of an element as stored."""
        return self.scheme.stored_bits or BITS[self.scheme.element]

    @property
    def num_outputs(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def columns(self) -> slice:
        """The outputs to read, where tensors have them in columns."""
        return slice(*self.rows.rows)

    @property
    def group_size(self) -> int:
        """Inputs that share a scale, at most all of a row."""
        return min(self.scheme.group_size or self.width, self.width)

    @property
    def num_groups(self) -> int:
        """Scales of an output; the last group may be short."""
        return -(-self.width // self.group_size)

    def read(self, tensor: str, shape: tuple[int, ...], dtype: str, rows: tuple[int, int] | None = None) -> Array:
        """Return a tensor, or rows of it, as stored."""
        return self.tensors.raw(self.name(tensor), shape, (dtype,), rows)

    def read_any(self, tensor: str, shapes: Sequence[tuple[int, ...]], dtypes: Collection[str]) -> Array:
        """Return a tensor that has one of several shapes; error messages name the first."""
        name = self.name(tensor)
        shape = self.tensors.shape(name) if name in self.tensors.names else shapes[0]
        return self.tensors.raw(name, shape if shape in shapes else shapes[0], dtypes)

    def scales(self, tensor: str, *shapes: tuple[int, ...]) -> Array:
        """Return a tensor of scales, of one of several shapes, as float32; ModelError where one is no number."""
        if self.scheme.scale_kind == "exponent":
            return self.powers(tensor, self.read_any(tensor, shapes, ("U8",)))
        scales = _float32(self.read_any(tensor, shapes, SCALE_DTYPES))
        if self.scheme.scale_kind == "global":
            with np.errstate(all="ignore"):
                scales = scales / _float32(self.read_any(GLOBAL_SCALE, [(1,), ()], FLOAT_DTYPES))
        if not (np.abs(scales) <= MAX_SCALE).all():
            raise self.tensors.error(self.name(tensor), f"has scales that are NaN or greater than {MAX_SCALE}")
        return scales

    def powers(self, tensor: str, exponents: Array) -> Array:
        """Return the powers of two of exponents, uint8 with a bias; ModelError where one is too large for a weight."""
        highest = int(exponents.max())
        if highest > MAX_EXPONENT:
            name = self.name(tensor)
            raise self.tensors.error(name, f"has an exponent of {highest}, the limit is {MAX_EXPONENT}")
        return _powers_of_two(exponents)

    def zero_points(self, whole: Array) -> Array | int:
        """Return zero points of all outputs, uint8 [num_rows, num_groups], cut to those read, or one for all if equal.

        All of the tensor decides, so that every part of a weight has the same form.
        """
        low, high = int(whole.min()), int(whole.max())
        return low if low == high else whole[self.columns].copy()

    def group_index(self, tensor: str) -> Array | None:
        """Return the group of each input, int32 [width]; None where groups are of consecutive inputs.

        A tensor of -1 alone is none: tools write it that reserve one. Raises ModelError for groups of other sizes than
        consecutive ones.
        """
        name = self.name(tensor)
        if name not in self.tensors.names and not self.scheme.has_input_order:
            return None
        index = self.read(tensor, (self.width,), "I32")
        consecutive = np.arange(self.width, dtype=np.int32) // self.group_size
        if np.array_equal(index, consecutive) or (index == -1).all():
            return None
        if not np.array_equal(np.sort(index), consecutive):
            sizes = f"{self.num_groups} groups of {self.group_size}, the last for the rest"
            raise self.tensors.error(name, f"does not divide {self.width} inputs into {sizes}")
        return index.copy()


def num_words(count: int, bits: int) -> int:
    """Return the words that `count` elements of some bits take."""
    return -(-count * bits // WORD_BITS)


def _float32(values: Array) -> Array:
    """Return scales in float32, those that are powers of two, too."""
    if values.dtype != FLOAT8_E8M0:
        return converted(values, FLOAT32)
    exponents = bits(values)
    return np.where(exponents == NAN_EXPONENT, np.float32(np.nan), _powers_of_two(exponents))


def _powers_of_two(exponents: Array) -> Array:
    powers: Array = np.ldexp(np.float32(1), exponents.astype(np.int32) - EXPONENT_BIAS)
    return powers


def unpacked(words: Array, num_bits: int, count: int) -> Array:
    """Return the first `count` elements, uint8, of each row of words, int32 [..., num_words]; low bits come first.

    Elements of other bits than 4 and 8 follow each other across the ends of bytes and words.
    """
    words = np.ascontiguousarray(words)
    if num_bits not in (4, 8):
        return unpacked_bits(words.view(np.uint8), num_bits, count)
    elements = words.reshape(-1).view(np.uint8)
    if num_bits == 4:
        pairs = elements.astype(np.uint16)
        pairs |= pairs << 4
        pairs &= 0x0F0F  # two bytes in memory: the low nibble and the high one
        elements = pairs.view(np.uint8)
    return elements.reshape(*words.shape[:-1], -1)[..., :count]


def unpacked_bits(octets: Array, num_bits: int, count: int) -> Array:
    """Return the first `count` elements, uint8, of each row of bytes, uint8 [..., num_bytes], of 1 to 8 bits each."""
    padding = [(0, 0)] * (octets.ndim - 1) + [(0, -octets.shape[-1] % num_bits)]
    groups = np.pad(octets, padding).reshape(*octets.shape[:-1], -1, num_bits).astype(np.int64)  # eight elements each
    whole = sum((groups[..., at] << 8 * at for at in range(1, num_bits)), groups[..., 0])
    elements = np.stack([whole >> num_bits * at & (1 << num_bits) - 1 for at in range(8)], axis=-1)
    return elements.astype(np.uint8).reshape(*octets.shape[:-1], -1)[..., :count]
