"""Parser of the quantization_config of gpt-oss: experts in MXFP4, everything else in 16 bits. No torch."""

from quire.formats.quantized.config_options import NOTES, matching_rule
from quire.formats.quantized.schemes import ModuleRule, StoredScheme
from quire.model.config_reader import ConfigReader

GROUP_SIZE = 32
EXPERTS = ".experts."


def mxfp4_rules(config: ConfigReader) -> list[ModuleRule]:
    """Return the rules of a quantization_config. Raises ModelError for what is not supported."""
    config.allow_only("modules_to_not_convert", *NOTES)
    dense = [matching_rule(config, "path", name, None) for name in config.names("modules_to_not_convert")]
    return [*dense, ModuleRule("part", EXPERTS, StoredScheme("mxfp4", "codebook4", GROUP_SIZE))]
