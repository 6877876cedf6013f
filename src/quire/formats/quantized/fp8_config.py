"""Parser of the quantization_config of FP8 checkpoints, as Hugging Face and AutoFP8 write them. No torch.

Activations stay in 16 bits, also where the config has scales for them.
"""

from quire.formats.quantized.config_options import HEAD, NOTES, block_of, matching_rule
from quire.formats.quantized.schemes import ModuleRule, StoredScheme
from quire.model.config_reader import ConfigReader


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
