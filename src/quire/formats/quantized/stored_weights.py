"""Weights of quantized checkpoints as stored, with an element per byte or packed into words.

`weight` is int8 or e4m3 [out, in]. Its scales, `weight_scale` or `weight_scale_inv`, are both what an element is
multiplied with: one for all, one per output, one per group of inputs, or one per block of outputs and inputs.
`weight_zero_point` is int8, shaped as the scales.

GPTQ (Frantar et al. 2023), as AutoGPTQ and GPTQModel write it: `qweight` int32 [in / n, out] has n = 32 / bits inputs
per word, `qzeros` int32 [groups, out / n] n outputs per word, `scales` are [groups, out], `g_idx` int32 [in] is the
group of each input. A value is scale * (q - zero); version 1 stores zero - 1, modulo the range of elements, version 2
the zero itself.

MXFP4 (Rouhani et al. 2023), as gpt-oss stores it: `blocks` uint8 [out, in / 32, 16] have two e2m1 numbers in a byte,
the first in its low bits; `scales` uint8 [out, in / 32] are powers of two, with 127 added to the exponent. A value is
number * scale.

AWQ (Lin et al. 2024), as AutoAWQ writes it for its GEMM kernels: `qweight` int32 [in, out / 8] and `qzeros` int32
[groups, out / 8] have 8 outputs per word, in the order 0 2 4 6 1 3 5 7 from the low bits on; `scales` are
[groups, out]. A value is scale * (q - zero).
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from quire.core.arrays import FLOAT8_E8M0, FLOAT32, Array, bits
from quire.formats.quantized.schemes import StoredScheme
from quire.kernels.conversion import converted
from quire.kernels.linear_weight import CODEBOOK4, LinearWeight
from quire.model.checkpoints.tensor_reader import FLOAT_DTYPES, TensorReader
from quire.model.weight_format import ModuleRows

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


MIDDLES = {"int4": 8, "int8": 128}  # added to signed elements
SCALE_NAMES = ("weight_scale", "weight_scale_inv")
_NAN = 0x7F  # an e4m3 without its sign; there are no infinities


def read_plain(module: StoredModule) -> LinearWeight:
    """Return a module's weight."""
    is_float = module.scheme.element == "fp8"
    scale_name = next((name for name in SCALE_NAMES if module.name(name) in module.tensors.names), SCALE_NAMES[0])
    return LinearWeight(
        module.scheme.element,
        (_float_elements(module) if is_float else _integer_elements(module),),
        module.num_outputs,
        module.width,
        scales=row_scales(module, scale_name),
        zero_points=None if is_float else _zero_points(module),
        group_size=module.group_size,
        dtype=module.tensors.dtype,
    )


def row_scales(module: StoredModule, tensor: str) -> Array:
    """Return scales as float32 [num_outputs, num_groups]; those of several rows are repeated."""
    return _by_row(module.scales(tensor, *_shapes(module)), module)[module.columns].copy()


def _shapes(module: StoredModule) -> list[tuple[int, ...]]:
    """Return the shapes that scales may have, and zero points."""
    num_blocks = -(-module.rows.num_rows // module.scheme.block_rows)
    shapes: list[tuple[int, ...]] = [(num_blocks, module.num_groups)]
    is_row = module.scheme.block_rows == 1 and not module.scheme.group_size
    return [*shapes, (num_blocks,), (1,), (1, 1), ()] if is_row else shapes


def _by_row(values: Array, module: StoredModule) -> Array:
    """Return [num_rows, num_groups] of a tensor of one of the shapes."""
    num_rows = module.rows.num_rows
    if values.size == 1:
        return np.broadcast_to(values.reshape(1, 1), (num_rows, 1))
    blocks = np.arange(num_rows) // module.scheme.block_rows
    return values.reshape(-1, module.num_groups)[blocks]


def _float_elements(module: StoredModule) -> Array:
    """Return the bits of e4m3 elements, uint8 [num_outputs, width]."""
    shape = module.rows.num_rows, module.width
    octets = bits(module.read("weight", shape, "F8_E4M3", module.rows.rows))
    if int(octets.view(np.int8).max()) == _NAN or int(octets.max()) == _NAN | 0x80:
        raise module.tensors.error(module.name("weight"), "has values that are NaN")
    return octets


def _integer_elements(module: StoredModule) -> Array:
    """Return uint8 [num_outputs, width]: the signed elements with the middle of their range added."""
    shape = module.rows.num_rows, module.width
    return _unsigned(module, "weight", module.read("weight", shape, "I8", module.rows.rows))


def _zero_points(module: StoredModule) -> Array | int:
    if not module.scheme.has_zero_points:
        return MIDDLES[module.scheme.element]
    signed = module.read_any("weight_zero_point", _shapes(module), ("I8",))
    return module.zero_points(_by_row(_unsigned(module, "weight_zero_point", signed), module))


def _unsigned(module: StoredModule, tensor: str, signed: Array) -> Array:
    """Return int8 values as uint8 with the middle of their range added."""
    middle = MIDDLES[module.scheme.element]
    if middle == 128:
        return bits(signed) ^ 128
    low, high = int(signed.min()), int(signed.max())
    if low < -middle or high >= middle:
        raise module.tensors.error(
            module.name(tensor), f"has elements from {low} to {high}, expected {-middle} to {middle - 1}"
        )
    return bits(signed + np.int8(middle))


def read_gptq(module: StoredModule) -> LinearWeight:
    """Return a module's weight. Groups of inputs that are not consecutive have a group index."""
    num_bits, num_rows = BITS[module.scheme.element], module.rows.num_rows
    per_word = WORD_BITS // num_bits
    if module.width % per_word or num_rows % per_word:
        shape = [num_rows, module.width]
        raise module.tensors.error(module.name("qweight"), f"packs {per_word} elements per word, {shape} do not divide")
    words = module.read("qweight", (module.width // per_word, num_rows), "I32")[:, module.columns]
    zeros = module.read("qzeros", (module.num_groups, num_rows // per_word), "I32")
    zeros = (unpacked(zeros, num_bits, num_rows) + module.scheme.zero_offset) & ((1 << num_bits) - 1)
    return LinearWeight(
        module.scheme.element,
        (unpacked(words.T, num_bits, module.width),),
        module.num_outputs,
        module.width,
        scales=module.scales("scales", (module.num_groups, num_rows))[:, module.columns].T.copy(),
        zero_points=module.zero_points(zeros.T),
        group_size=module.group_size,
        group_index=module.group_index("g_idx"),
        dtype=module.tensors.dtype,
    )


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def read_mxfp4(module: StoredModule) -> LinearWeight:
    """Return a module's weight. ModelError for inputs that are no whole blocks, or scales that are no weights'."""
    num_rows, width, size = module.rows.num_rows, module.width, module.group_size
    if width % size:
        raise module.tensors.error(module.name("blocks"), f"has blocks of {size} inputs, {width} do not divide")
    blocks = module.read("blocks", (num_rows, width // size, size // 2), "U8", module.rows.rows)
    elements = unpacked(np.ascontiguousarray(blocks.reshape(module.num_outputs, -1)).view(np.int32), 4, width)
    return LinearWeight(
        CODEBOOK4,
        (elements,),
        module.num_outputs,
        width,
        scales=_scales(module),
        group_size=size,
        codebook=np.array([*E2M1, *(-number for number in E2M1)], np.float32),
        dtype=module.tensors.dtype,
    )


def _scales(module: StoredModule) -> Array:
    shape = module.rows.num_rows, module.num_groups
    return module.powers("scales", module.read("scales", shape, "U8", module.rows.rows))


PER_WORD = 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of each of a word's outputs


def read_awq(module: StoredModule) -> LinearWeight:
    """Return a module's weight."""
    start, stop, num_rows = *module.rows.rows, module.rows.num_rows
    if num_rows % PER_WORD:
        raise module.tensors.error(
            module.name("qweight"), f"packs {PER_WORD} outputs per word, {num_rows} do not divide"
        )
    words = module.read("qweight", (module.width, num_rows // PER_WORD), "I32")
    zeros = module.read("qzeros", (module.num_groups, num_rows // PER_WORD), "I32")
    return LinearWeight(
        module.scheme.element,
        (_outputs(words[:, start // PER_WORD : stop // PER_WORD]),),
        module.num_outputs,
        module.width,
        scales=module.scales("scales", (module.num_groups, num_rows))[:, module.columns].T.copy(),
        zero_points=module.zero_points(_outputs(zeros)),
        group_size=module.group_size,
        dtype=module.tensors.dtype,
    )


def _outputs(words: Array) -> Array:
    """Return uint8 [outputs, n] of words [n, outputs / 8]."""
    num_inputs, num_words = words.shape
    octets = np.ascontiguousarray(words.T).view(np.uint8).reshape(num_words, num_inputs, 4)
    outputs = np.empty((num_words, PER_WORD, num_inputs), np.uint8)
    for number, place in enumerate(PLACES):
        octet = octets[:, :, place // 2]
        outputs[:, number] = octet >> 4 if place % 2 else octet & 15
    return outputs.reshape(-1, num_inputs)
