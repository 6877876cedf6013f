"""Parser of the quantization_config of GPTQ. No torch."""

from dataclasses import replace

from quire.formats.quantized.config_options import (
    HEAD,
    INTEGER_ELEMENTS,
    NOTES,
    group_size,
    matching_rule,
    number_choice,
)
from quire.formats.quantized.schemes import ModuleRule, StoredScheme
from quire.model.config_reader import ConfigReader


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
