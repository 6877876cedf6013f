"""Parsers of quantization_config, by quantization method. No torch.

Every option is checked: what changes a weight is read, what only documents the making of a checkpoint is known by name,
and anything else is refused. Errors are ModelErrors with the file, the option, its value and what is supported.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from quire.formats.quantized.compressed_tensors import compressed_tensors_rules
from quire.formats.quantized.schemes import (
    HEAD,
    INTEGER_ELEMENTS,
    NOTES,
    ModuleRule,
    StoredQuantization,
    StoredScheme,
    block_of,
    checked_rules,
    group_size,
    matching_rule,
    number_choice,
)
from quire.model.config_reader import CONFIG_FILE, ConfigReader
from quire.model.quantization import CONFIG_KEYS

LAYOUTS = ("version", "format", "checkpoint_format")  # names that tools have for one option


def awq_rules(config: ConfigReader) -> list[ModuleRule]:
    """Return the rules of a quantization_config. Raises ModelError for what is not supported."""
    config.allow_only(
        *("bits", "w_bit", "group_size", "q_group_size", "zero_point", "modules_to_not_convert"),
        *LAYOUTS,
        *("sym", "desc_act", "lm_head", "pack_dtype"),
        *NOTES,
    )
    for key, harmless in (("desc_act", False), ("lm_head", False), ("pack_dtype", "int32")):
        config.reject(key, harmless, why="the layout of AWQ has no such option")
    if not config.flag("zero_point", True):
        raise config.error("zero_point = False is not supported: weights have zero points")
    if config.raw("backend") == "llm-awq":
        raise config.error("backend = 'llm-awq' is not supported: its layout is another")
    for key in LAYOUTS:
        if config.has(key) and str(config.raw(key)).lower() != "gemm":
            raise config.error(f"{key} = {config.raw(key)!r:.80} is not supported: gemm is")
    scheme = StoredScheme(
        "awq",
        number_choice(config, "bits" if config.has("bits") else "w_bit", {4: INTEGER_ELEMENTS[4]}),
        group_size(config, "group_size" if config.has("group_size") else "q_group_size"),
        has_zero_points=True,
    )
    dense = [HEAD, *config.names("modules_to_not_convert")]
    return [*(ModuleRule("part", name, None) for name in dense), ModuleRule("all", "", scheme)]


def gptq_rules(config: ConfigReader) -> list[ModuleRule]:
    """Return the rules of a quantization_config. Raises ModelError for what is not supported."""
    config.allow_only(
        *("bits", "group_size", "sym", "desc_act", "lm_head", "dynamic", "modules_in_block_to_quantize"),
        *("format", "checkpoint_format", "pack_dtype", "is_marlin_format"),
        *NOTES,
    )
    config.reject("pack_dtype", "int32", why="weights are packed into int32")
    config.reject("is_marlin_format", False, why="weights are read in the layout of GPTQ")
    key = "checkpoint_format" if config.has("checkpoint_format") else "format"
    offset = config.choice(key, {"gptq": 1, "gptq_v2": 0}, "gptq")
    scheme = StoredScheme(
        "gptq",
        number_choice(config, "bits", INTEGER_ELEMENTS),
        group_size(config, "group_size"),
        has_zero_points=not config.flag("sym", True),
        zero_offset=offset,
        has_input_order=config.flag("desc_act", False),
    )
    rules = [] if config.flag("lm_head", False) else [ModuleRule("name", HEAD, None)]
    rules += [_gptq_override(options, text, scheme) for text, options in config.sections("dynamic").items()]
    named = [ModuleRule("part", name, scheme) for name in _gptq_modules(config)]
    return [*rules, *named, ModuleRule("all", "", None if named else scheme)]


def _gptq_override(options: ConfigReader, pattern: str, scheme: StoredScheme) -> ModuleRule:
    """Return the rule of an entry of `dynamic`: "-:PATTERN" leaves modules dense, "+:PATTERN" changes their scheme."""
    if pattern.startswith("-:"):
        return matching_rule(options, "pattern", pattern[2:], None)
    options.allow_only("bits", "group_size", "sym", "desc_act", *NOTES)
    changed = replace(
        scheme,
        element=number_choice(options, "bits", INTEGER_ELEMENTS, 4 if scheme.element == "int4" else 8),
        group_size=group_size(options, "group_size", scheme.group_size),
        has_zero_points=not options.flag("sym", not scheme.has_zero_points),
        has_input_order=options.flag("desc_act", scheme.has_input_order),
    )
    return matching_rule(options, "pattern", pattern.removeprefix("+:"), changed)


def _gptq_modules(config: ConfigReader) -> list[str]:
    """Return modules_in_block_to_quantize, which are names or lists of them."""
    key = "modules_in_block_to_quantize"
    value = config.raw(key)
    if isinstance(value, list) and all(isinstance(names, list) for names in value):
        return config.nested(key, {"lists": [name for names in value for name in names]}).names("lists")
    return config.names(key)


GROUP_SIZE = 32
EXPERTS = ".experts."


def mxfp4_rules(config: ConfigReader) -> list[ModuleRule]:
    """Return the rules of a quantization_config. Raises ModelError for what is not supported."""
    config.allow_only("modules_to_not_convert", *NOTES)
    dense = [matching_rule(config, "path", name, None) for name in config.names("modules_to_not_convert")]
    return [*dense, ModuleRule("part", EXPERTS, StoredScheme("mxfp4", "codebook4", GROUP_SIZE))]


def fp8_rules(config: ConfigReader) -> list[ModuleRule]:
    """Return the rules of a quantization_config. Raises ModelError for what is not supported."""
    config.allow_only(
        *("activation_scheme", "weight_block_size", "fmt", "scale_fmt", "modules_to_not_convert", "ignored_layers"),
        *("modules_to_convert", "expert_dtype"),
        *NOTES,
    )
    config.choice("activation_scheme", {"dynamic": True, "static": True}, "dynamic")
    config.choice("fmt", {"e4m3": True, "float8_e4m3fn": True}, "e4m3")
    config.choice("scale_fmt", {"float": True, "ue8m0": True}, "float")
    config.reject("expert_dtype", "fp8", why="weights are e4m3")
    config.reject("modules_to_convert", [], why="embedding tables are read as floating-point numbers only")
    block_rows, block_inputs = block_of(config, "weight_block_size")
    scheme = StoredScheme("plain", "fp8", block_inputs, block_rows)
    dense = [HEAD, *config.names("modules_to_not_convert"), *config.names("ignored_layers")]
    return [*(matching_rule(config, "path", name, None) for name in dense), ModuleRule("all", "", scheme)]


_PARSERS: Mapping[str, Callable[[ConfigReader], list[ModuleRule]]] = {
    "gptq": gptq_rules,
    "awq": awq_rules,
    "compressed-tensors": compressed_tensors_rules,
    "fp8": fp8_rules,
    "mxfp4": mxfp4_rules,
}


def quantization_from_config(values: Mapping[str, object], source: str = CONFIG_FILE) -> StoredQuantization | None:
    """Return the quantization that a config.json describes, or None. Raises ModelError for what is not supported."""
    config = ConfigReader(values, source)
    key = next((key for key in CONFIG_KEYS if config.has(key)), None)
    if key is None:
        return None
    options = config.nested(key, config.section(key))
    default = "compressed-tensors" if options.has("config_groups") else None
    method = options.choice("quant_method", {name: name for name in _PARSERS}, default)
    return StoredQuantization(method, checked_rules(options, *_PARSERS[method](options)))
