"""Weights of compressed-tensors: pack-quantized integers, and floats of 4 and 6 bits.

Integers: `weight_packed` int32 [out, ceil(in * bits / 32)] has consecutive inputs in a word, `weight_zero_point` int32
[ceil(out * bits / 32), groups] consecutive outputs, both with the middle of the signed range added. `weight_scale` is
[out, groups] or one for all, `weight_shape` int64 [2], `weight_g_idx` int32 [in] as in GPTQ. A value is
scale * (q - zero), without zero points scale * q.

Floats: `weight_packed` uint8 [out, in * bits / 8] has codes of e2m1 or e2m3 numbers, low bits first. `weight_scale`
[out, groups] is what a number is multiplied with: e4m3 over `weight_global_scale` (NVFP4), or a power of two (MXFP4 and
MXFP6, uint8 exponents).
"""

import numpy as np

from quire.core.arrays import FLOAT8_E4M3, Array, bits
from quire.formats.quantized.packed_weights import E2M1
from quire.formats.quantized.plain_weights import row_scales
from quire.formats.quantized.stored_weights import StoredModule, num_words, unpacked, unpacked_bits
from quire.kernels.conversion import converted
from quire.kernels.linear_weight import CODEBOOK4, LinearWeight

E2M3 = tuple(code / 8 for code in range(8)) + tuple((1 + code / 8) * 2**exp for exp in range(3) for code in range(8))


def read_packed(module: StoredModule) -> LinearWeight:
    """Return a module's weight. Groups of inputs that are not consecutive have a group index."""
    num_bits, num_rows = module.bits, module.rows.num_rows
    _check_shape(module)
    words = module.read("weight_packed", (num_rows, num_words(module.width, num_bits)), "I32", module.rows.rows)
    return LinearWeight(
        module.scheme.element,
        (np.ascontiguousarray(unpacked(words, num_bits, module.width)),),
        module.num_outputs,
        module.width,
        scales=row_scales(module, "weight_scale"),
        zero_points=_zero_points(module, num_bits) if module.scheme.has_zero_points else 1 << (num_bits - 1),
        group_size=module.group_size,
        group_index=module.group_index("weight_g_idx"),
        dtype=module.tensors.dtype,
    )


def read_float_codes(module: StoredModule) -> LinearWeight:
    """Return a module's weight, of e2m1 numbers by their codes, of e2m3 as the e4m3 numbers that have their values."""
    num_octets = -(-module.width * module.bits // 8)
    octets = module.read("weight_packed", (module.rows.num_rows, num_octets), "U8", module.rows.rows)
    codes, is_coded = unpacked_bits(octets, module.bits, module.width), module.scheme.element == CODEBOOK4
    numbers = E2M1 if is_coded else E2M3
    table = np.array([*numbers, *(-number for number in numbers)], np.float32)
    return LinearWeight(
        module.scheme.element,
        (codes if is_coded else bits(converted(table, FLOAT8_E4M3))[codes],),
        module.num_outputs,
        module.width,
        scales=row_scales(module, "weight_scale"),
        group_size=module.group_size,
        codebook=table if is_coded else None,
        dtype=module.tensors.dtype,
    )


def _check_shape(module: StoredModule) -> None:
    expected = [module.rows.num_rows, module.width]
    found = module.read_any("weight_shape", [(2,)], ("I64", "I32")).tolist()
    if found != expected:
        raise module.tensors.error(module.name("weight_shape"), f"is {found}, expected {expected}")


def _zero_points(module: StoredModule, num_bits: int) -> Array | int:
    num_rows = module.rows.num_rows
    words = module.read("weight_zero_point", (num_words(num_rows, num_bits), module.num_groups), "I32")
    return module.zero_points(unpacked(words.T, num_bits, num_rows).T)
