"""compressed-tensors: its quantization_config, and weights of pack-quantized integers and floats of 4 and 6 bits.

Integers: `weight_packed` int32 [out, ceil(in * bits / 32)] has consecutive inputs in a word, `weight_zero_point` int32
[ceil(out * bits / 32), groups] consecutive outputs, both with the middle of the signed range added. `weight_scale` is
[out, groups] or one for all, `weight_shape` int64 [2], `weight_g_idx` int32 [in] as in GPTQ. A value is
scale * (q - zero), without zero points scale * q.

Floats: `weight_packed` uint8 [out, in * bits / 8] has codes of e2m1 or e2m3 numbers, low bits first. `weight_scale`
[out, groups] is what a number is multiplied with: e4m3 over `weight_global_scale` (NVFP4), or a power of two (MXFP4 and
MXFP6, uint8 exponents).

A module is ignored, or has the scheme of the target that is its name, else of the first pattern `re:` that matches its
beginning, in alphabetical order as in the format's own library, else of its class, which is Linear here. No torch.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from quire.core.arrays import FLOAT8_E4M3, Array, bits
from quire.formats.quantized.schemes import (
    FLOAT_ELEMENTS,
    Element,
    ModuleRule,
    ScaleKind,
    Storage,
    StoredScheme,
    block_of,
    group_size,
    matching_rule,
    number_choice,
)
from quire.formats.quantized.stored_weights import E2M1, StoredModule, num_words, row_scales, unpacked, unpacked_bits
from quire.kernels.conversion import converted
from quire.kernels.linear_weight import CODEBOOK4, LinearWeight
from quire.model.config_reader import ConfigReader

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


CLASS = "Linear"
PATTERN_SIGN = "re:"
_STORAGES: Mapping[str, Storage] = {
    "pack-quantized": "packed",
    "int-quantized": "plain",
    "float-quantized": "plain",
    "naive-quantized": "plain",
    "nvfp4-pack-quantized": "float_codes",
    "mxfp4-pack-quantized": "float_codes",
    "mxfp6-pack-quantized": "float_codes",
    "mxfp8-quantized": "plain",
}


class _SmallFloats(NamedTuple):
    """Format of floats in groups, where the name says all."""

    num_bits: int
    group_size: int
    element: Element
    scale_kind: ScaleKind


_SMALL_FLOATS: Mapping[str, _SmallFloats] = {
    "nvfp4-pack-quantized": _SmallFloats(4, 16, "codebook4", "global"),
    "mxfp4-pack-quantized": _SmallFloats(4, 32, "codebook4", "exponent"),
    "mxfp6-pack-quantized": _SmallFloats(6, 32, "fp8", "exponent"),
    "mxfp8-quantized": _SmallFloats(8, 32, "fp8", "exponent"),
}
# The least element that holds an integer of some bits.
_INTEGERS: Mapping[int, Element] = {bits: "int4" if bits <= 4 else "int8" for bits in range(2, 9)}
_MIXED = "mixed-precision"  # groups name their formats
_ORDERS = {"weight": False, "static": False, "group": True, "dynamic": True}
_ARGUMENTS = (
    "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder",
    "observer", "observer_kwargs", "scale_dtype", "zp_dtype",
)  # fmt: skip


def compressed_tensors_rules(config: ConfigReader) -> list[ModuleRule]:
    """Return the rules of a quantization_config. Raises ModelError for what is not supported."""
    config.allow_only(
        *("quant_method", "format", "config_groups", "ignore", "quantization_status", "kv_cache_scheme", "version"),
        *("global_compression_ratio", "sparsity_config", "transform_config", "moe_sparsity_config"),
    )
    config.choice("quantization_status", {"compressed": True, "frozen": True}, "compressed")
    sparsity = config.nested("sparsity_config", config.section("sparsity_config"))
    sparsity.reject("format", "dense", why="weights are read dense")
    for key in ("transform_config", "moe_sparsity_config"):
        config.reject(key, {}, why="weights are read as they are")
    targets: list[tuple[str, StoredScheme]] = []
    for group in config.sections("config_groups").values():
        scheme = _scheme(config, group)
        targets += [(name, scheme) for name in group.names("targets") if scheme is not None]
    ignored = [_rule(config, name, None) for name in config.names("ignore")]
    return [*ignored, *(_rule(config, name, scheme) for name, scheme in sorted(targets, key=_specificity))]


def _specificity(target: tuple[str, StoredScheme]) -> tuple[int, str]:
    """Return the sorting key of a target: names come first, then patterns, then the class."""
    name = target[0]
    return (2 if name == CLASS else 1 if name.startswith(PATTERN_SIGN) else 0, name)


def _rule(config: ConfigReader, name: str, scheme: StoredScheme | None) -> ModuleRule:
    if name.startswith(PATTERN_SIGN):
        return matching_rule(config, "pattern", name.removeprefix(PATTERN_SIGN), scheme)
    return ModuleRule("all" if name == CLASS else "name", name, scheme)


def _scheme(config: ConfigReader, group: ConfigReader) -> StoredScheme | None:
    """Return the scheme of a config group; None for one that leaves weights alone."""
    group.allow_only("targets", "weights", "input_activations", "output_activations", "format")
    if not group.has("weights"):
        return None
    group.reject("output_activations", why="outputs are not quantized")
    form = group if group.has("format") else config
    known = {**_STORAGES} if form is group else {**_STORAGES, _MIXED: None}
    storage = form.choice("format", known)
    if storage is None:
        raise group.error(f"format is missing; {_MIXED} needs one in each group")
    weights = group.nested("weights", group.section("weights"))
    weights.allow_only(*_ARGUMENTS)
    weights.reject("dynamic", False, why="weights are quantized in the file")
    quantizes_activations = _quantizes_activations(group)
    small_floats = _SMALL_FLOATS.get(str(form.raw("format")))
    if small_floats is not None:
        return _small_float_scheme(weights, storage, small_floats)
    return _weight_scheme(weights, storage, quantizes_activations=quantizes_activations)


def _weight_scheme(weights: ConfigReader, storage: Storage, *, quantizes_activations: bool) -> StoredScheme:
    is_float = weights.choice("type", {"int": False, "float": True}, "int")
    is_symmetric = weights.flag("symmetric", True)
    element = number_choice(weights, "num_bits", FLOAT_ELEMENTS if is_float else _INTEGERS, 8)
    if is_float and (storage == "packed" or not is_symmetric):
        raise weights.error("type = 'float' is supported without zero points and not packed")
    inputs, rows = _granularity(weights)
    if rows > 1 and not is_symmetric:
        raise weights.error("symmetric = False is not supported with blocks")
    order = weights.raw("actorder")
    return StoredScheme(
        storage,
        element,
        inputs,
        rows,
        has_zero_points=not is_symmetric,
        has_input_order=weights.choice("actorder", _ORDERS, "weight") if order is not False else False,
        quantizes_activations=quantizes_activations and not is_float,
        stored_bits=_stored_bits(weights, storage),
    )


def _stored_bits(weights: ConfigReader, storage: Storage) -> int:
    """Return the bits of a packed element, 0 where they are those of its kind."""
    num_bits = weights.size("num_bits", 8)
    return num_bits if storage == "packed" and num_bits not in (4, 8) else 0


def _small_float_scheme(weights: ConfigReader, storage: Storage, form: _SmallFloats) -> StoredScheme:
    """Return the scheme of a format that has one element and one group size."""
    weights.choice("type", {"float": True})
    number_choice(weights, "num_bits", {form.num_bits: True})
    number_choice(weights, "group_size", {form.group_size: True}, form.group_size)
    weights.choice("strategy", {"group": True, "tensor_group": True}, "group")
    if not weights.flag("symmetric", True):
        raise weights.error("symmetric = False is not supported for floats")
    bits = form.num_bits if form.element == "fp8" and storage == "float_codes" else 0
    return StoredScheme(storage, form.element, form.group_size, stored_bits=bits, scale_kind=form.scale_kind)


def _granularity(weights: ConfigReader) -> tuple[int, int]:
    """Return the inputs and the outputs that share a scale; 0 inputs: a scale per output, or for all."""
    size = group_size(weights, "group_size") if weights.has("group_size") else 0
    default = "group" if size else "channel" if weights.has("group_size") else "tensor"
    strategy = weights.choice("strategy", {name: name for name in ("tensor", "channel", "group", "block")}, default)
    if strategy == "block":
        if not weights.has("block_structure"):
            raise weights.error("block_structure is missing")
        rows, inputs = block_of(weights, "block_structure")
        return inputs, rows
    if (strategy == "group") != bool(size):
        raise weights.error(f"strategy = {strategy!r} with group_size = {weights.raw('group_size')!r:.40}")
    return size, 1


def _quantizes_activations(group: ConfigReader) -> bool:
    """Return whether a group's activations are int8; float ones, of any granularity, are left in 16 bits."""
    if not group.has("input_activations"):
        return False
    inputs = group.nested("input_activations", group.section("input_activations"))
    inputs.allow_only(*_ARGUMENTS)
    if not inputs.choice("type", {"int": True, "float": False}, "int"):
        return False
    inputs.flag("dynamic", False)
    inputs.flag("symmetric", True)
    number_choice(inputs, "num_bits", {8: 8}, 8)
    return inputs.choice("strategy", {"token": True, "tensor": True}, "tensor")
