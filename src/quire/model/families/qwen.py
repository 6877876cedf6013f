"""Qwen2 (Yang et al. 2024): Llama with biases on query, key and value. Qwen3 (2025): with norms on query and key.

In both, some layers may look back on a sliding window only.
"""

from dataclasses import replace

from quire.model.config_reader import ConfigReader
from quire.model.families.llama import llama
from quire.model.spec import DecoderSpec

DEFAULT_WINDOW = 4096
DEFAULT_FIRST_WINDOWED_LAYER = 28
QWEN3_HEAD_DIM = 128


def qwen2(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Qwen2."""
    spec = llama(config)
    return replace(
        spec,
        has_qkv_bias=True,
        has_attention_out_bias=False,
        has_feed_forward_bias=False,
        windows=_windows(config, spec.num_layers),
    )


def qwen3(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Qwen3, whose heads have a width of their own."""
    spec = llama(config.with_default("head_dim", QWEN3_HEAD_DIM))
    windows = _windows(config, spec.num_layers)
    return replace(spec, has_query_key_norm=True, has_feed_forward_bias=False, windows=windows)


def _windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """One window per layer: as `layer_types` says, or from layer `max_window_layers` on; none unless switched on."""
    is_windowed = config.flag("use_sliding_window", False)
    window = config.nullable_size("sliding_window", DEFAULT_WINDOW) if is_windowed else None
    kinds = {"sliding_attention": window, "full_attention": None}
    if layer_types := config.strings("layer_types", kinds):
        return tuple(kinds[layer_type] for layer_type in layer_types)
    first = config.count("max_window_layers", DEFAULT_FIRST_WINDOWED_LAYER)
    return tuple(window if layer >= first else None for layer in range(num_layers))
