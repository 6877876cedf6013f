"""Parser of the quantization_config of AWQ. No torch."""

from quire.formats.quantized.config_options import HEAD, INTEGER_ELEMENTS, NOTES, group_size, number_choice
from quire.formats.quantized.schemes import ModuleRule, StoredScheme
from quire.model.config_reader import ConfigReader

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
