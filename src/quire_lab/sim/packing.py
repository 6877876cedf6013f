"""Bytes of packed linear weights, by back end and weight scheme. No torch."""

from dataclasses import dataclass

from quire.core.errors import ConfigError
from quire.model.quantization import WHOLE_ROW, WeightScheme

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ELEMENT_BITS = {"int8": 8, "int4": 4, "fp8": 8, "codebook4": 4}
STRIP_ROWS = 16                                   # of packed quantized weights
TILE_INPUTS = {"int8": (16, 32, 64), "int4": (32, 64)}  # the smallest that holds a group, or else the largest
CACHE_LINE = 64  # bytes


@dataclass(frozen=True, slots=True)
class Packing:
    """Storage of weights in a back end: rows and inputs of linear ones padded to multiples, dtypes.

    A tied head may be kept twice, and an embedding table in the blocks of its file.
    """

    row_multiple: int
    input_multiple: int            # of bfloat16 weights
    kernel_dtypes: frozenset[str]  # everything else is float32, the KV cache too
    copies_tied_head: bool
    keeps_table_blocks: bool

    def kernel_dtype(self, dtype: str) -> str:
        """Return the dtype in which weights and KV cache of a model of `dtype` are kept."""
        return dtype if dtype in self.kernel_dtypes else "float32"

    def num_weights(self, num_rows: int, width: int, dtype: str) -> int:
        """Return the elements of a packed weight, padding among them."""
        inputs = self.input_multiple if dtype == "bfloat16" else 1
        return -(-num_rows // self.row_multiple) * self.row_multiple * -(-width // inputs) * inputs


CPU_PACKING = Packing(16, 32, frozenset({"float32", "bfloat16"}), copies_tied_head=True, keeps_table_blocks=True)
PLAIN_PACKING = Packing(1, 1, frozenset(DTYPE_BYTES), copies_tied_head=False, keeps_table_blocks=False)


def scheme_bits(scheme: WeightScheme, dtype: str, width: int) -> float:
    """Return the bits of a weight of `width` inputs for each output, its share of the scales among them."""
    if scheme.format == "dense":
        return 8 * DTYPE_BYTES[dtype]
    return _quantized_bytes(scheme, STRIP_ROWS, width) * 8 / (STRIP_ROWS * width)


def packed_bytes(scheme: WeightScheme, num_rows: int, width: int, dtype: str, packing: Packing) -> int:
    """Return the bytes of a packed weight [num_rows, width]; ConfigError for a format that is not known."""
    if scheme.format == "dense":
        kernel_dtype = packing.kernel_dtype(dtype)
        return packing.num_weights(num_rows, width, kernel_dtype) * DTYPE_BYTES[kernel_dtype]
    if scheme.format not in ELEMENT_BITS:
        known = ", ".join(("dense", *ELEMENT_BITS))
        raise ConfigError(f"weight format {scheme.format} is not supported yet; known are {known}")
    return _quantized_bytes(scheme, num_rows, width)


def _quantized_bytes(scheme: WeightScheme, num_rows: int, width: int) -> int:
    """Return the bytes of strips of 16 outputs: scales and tiles of inputs, group after group, or all scales first."""
    size = width if scheme.group_size == WHOLE_ROW else min(scheme.group_size, width)
    if not scheme.activation_group_size:
        return -(-num_rows // STRIP_ROWS) * _expanded_strip_bytes(scheme, size, width)
    size = min(size, scheme.activation_group_size)
    num_groups, last = -(-width // size), width % size or size
    tiles = TILE_INPUTS[scheme.format]
    tile_inputs = next((inputs for inputs in tiles if inputs >= size), tiles[-1])
    num_tiles = (num_groups - 1) * -(-size // tile_inputs) + -(-last // tile_inputs)
    elements = num_tiles * tile_inputs * ELEMENT_BITS[scheme.format] // 8
    return -(-num_rows // STRIP_ROWS) * STRIP_ROWS * (num_groups * _scale_bytes(scheme) + elements)


def _expanded_strip_bytes(scheme: WeightScheme, size: int, width: int) -> int:
    """Return the bytes of a strip with its elements by themselves, in whole cache lines."""
    elements = STRIP_ROWS * -(-width // 2) * 2 * ELEMENT_BITS[scheme.format] // 8
    return STRIP_ROWS * -(-width // size) * _scale_bytes(scheme) + -(-elements // CACHE_LINE) * CACHE_LINE


def _scale_bytes(scheme: WeightScheme) -> int:
    return 4 if scheme.correction == "constant" else 8
