"""Mistral 7B: Llama whose layers all look back on a sliding window (Jiang et al. 2023)."""

from dataclasses import replace

from quire.model.config_reader import ConfigReader
from quire.model.families.llama import llama
from quire.model.spec import DecoderSpec

DEFAULT_WINDOW = 4096  # where config.json leaves the key out; null means no window


def mistral(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Mistral."""
    spec = llama(config)
    return replace(
        spec,
        windows=(config.nullable_size("sliding_window", DEFAULT_WINDOW),) * spec.num_layers,
        has_qkv_bias=False,
        has_attention_out_bias=False,
        has_feed_forward_bias=False,
    )
