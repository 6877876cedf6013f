"""Weights of compressed-tensors, pack-quantized.

`weight_packed` int32 [out, ceil(in * bits / 32)] has consecutive inputs in a word, `weight_zero_point` int32
[ceil(out * bits / 32), groups] consecutive outputs, both with the middle of the signed range added. `weight_scale` is
[out, groups] or one for all, `weight_shape` int64 [2], `weight_g_idx` int32 [in] as in GPTQ. A value is
scale * (q - zero), without zero points scale * q.
"""

from torch import Tensor

from quire.formats.quantized_tensors.plain import MIDDLES, row_scales
from quire.formats.quantized_tensors.stored import BITS, StoredModule, num_words, unpacked
from quire.kernels.linear_weight import LinearWeight


def read_packed(module: StoredModule) -> LinearWeight:
    """Return a module's weight. Groups of inputs that are not consecutive have a group index."""
    bits, num_rows = BITS[module.scheme.element], module.rows.num_rows
    _check_shape(module)
    words = module.read("weight_packed", (num_rows, num_words(module.width, bits)), "I32", module.rows.rows)
    return LinearWeight(
        module.scheme.element,
        (unpacked(words, bits, module.width).contiguous(),),
        module.num_outputs,
        module.width,
        scales=row_scales(module, "weight_scale"),
        zero_points=_zero_points(module, bits) if module.scheme.has_zero_points else MIDDLES[module.scheme.element],
        group_size=module.group_size,
        group_index=module.group_index("weight_g_idx"),
        dtype=module.tensors.dtype,
    )


def _check_shape(module: StoredModule) -> None:
    expected = [module.rows.num_rows, module.width]
    found = module.read_any("weight_shape", [(2,)], ("I64", "I32")).tolist()
    if found != expected:
        raise module.tensors.error(module.name("weight_shape"), f"is {found}, expected {expected}")


def _zero_points(module: StoredModule, bits: int) -> Tensor | int:
    num_rows = module.rows.num_rows
    words = module.read("weight_zero_point", (num_words(num_rows, bits), module.num_groups), "I32")
    return module.zero_points(unpacked(words.T, bits, num_rows).T)
