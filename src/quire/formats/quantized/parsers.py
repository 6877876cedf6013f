"""Parsers of quantization_config, by quantization method. No torch.

Every option is checked: what changes a weight is read, what only documents the making of a checkpoint is known by name,
and anything else is refused. Errors are ModelErrors with the file, the option, its value and what is supported.
"""

from collections.abc import Callable, Mapping

from quire.formats.quantized.awq_config import awq_rules
from quire.formats.quantized.compressed_tensors_config import compressed_tensors_rules
from quire.formats.quantized.config_options import checked_rules
from quire.formats.quantized.fp8_config import fp8_rules
from quire.formats.quantized.gptq_config import gptq_rules
from quire.formats.quantized.mxfp4_config import mxfp4_rules
from quire.formats.quantized.schemes import ModuleRule, StoredQuantization
from quire.model.config_reader import CONFIG_FILE, ConfigReader
from quire.model.quantization import CONFIG_KEYS

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
