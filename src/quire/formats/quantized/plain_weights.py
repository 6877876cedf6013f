"""Quantized weights with an element per byte: FP8, and int-quantized and float-quantized of compressed-tensors.

`weight` is int8 or e4m3 [out, in]. Its scales, `weight_scale` or `weight_scale_inv`, are both what an element is
multiplied with: one for all, one per output, one per group of inputs, or one per block of outputs and inputs.
`weight_zero_point` is int8, shaped as the scales.
"""

import numpy as np

from quire.core.arrays import Array, bits
from quire.formats.quantized.stored_weights import StoredModule
from quire.kernels.linear_weight import LinearWeight

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
