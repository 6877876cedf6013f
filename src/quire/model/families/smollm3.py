"""SmolLM3: Llama with every fourth layer without rotary positions (Yang et al. 2025; Bakouch et al. 2025)."""

from dataclasses import replace

from quire.model.config_reader import ConfigReader
from quire.model.llama import llama
from quire.model.spec import DecoderSpec

INTERVAL = 4


def smollm3(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a SmolLM3."""
    spec = llama(config.with_default("tie_word_embeddings", True).with_default("num_key_value_heads", 4))
    rotated = config.flags("no_rope_layers", spec.num_layers)
    if rotated is None:
        interval = config.size("no_rope_layer_interval", INTERVAL)
        rotated = [(index + 1) % interval != 0 for index in range(spec.num_layers)]
    has_windows = config.flag("use_sliding_window", False) and config.has("sliding_window")
    window = config.size("sliding_window") if has_windows else None
    default = ["full_attention" if each else "sliding_attention" for each in rotated]
    types = config.layer_types(spec.num_layers, default=default)
    layers = (
        replace(layer, has_rotary=has_rotary, window=window if kind == "sliding_attention" else None)
        for layer, has_rotary, kind in zip(spec.layers, rotated, types, strict=True)
    )
    return replace(spec, layers=tuple(layers))
