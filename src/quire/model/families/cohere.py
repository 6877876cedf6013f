"""Cohere Command R and Command R7B: parallel sublayers behind one LayerNorm, interleaved rotary, scaled logits.

Cohere 2024 and 2025. The second has windows in three of four layers, and rotary positions in those alone.
"""

from dataclasses import replace
from functools import partial

from quire.model.config_reader import ConfigReader
from quire.model.llama import WEIGHTS as LLAMA_WEIGHTS
from quire.model.llama import llama
from quire.model.spec import DecoderSpec, interleaved

LOGIT_SCALE = 0.0625
DEFAULT_WINDOW = 4096
WINDOWED_LAYERS = 3  # before each layer without a window
WEIGHTS = replace(LLAMA_WEIGHTS, feed_forward_norm=None)


def cohere(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Command R or Command R+."""
    spec = _cohere(config)
    has_norms = config.flag("use_qk_norm", False)
    return spec.with_attention(has_query_key_norm=has_norms, is_query_key_norm_by_head=has_norms)


def _cohere(config: ConfigReader) -> DecoderSpec:
    config.reject("mlp_bias", False, why="its feed-forward has no biases")
    spec = llama(config.with_default("tie_word_embeddings", True)).with_layers(partial(replace, is_parallel=True))
    eps, scale = config.number("layer_norm_eps", 1e-5), config.number("logit_scale", LOGIT_SCALE)
    spec = replace(spec, norm="layer", norm_has_bias=False, norm_eps=eps, logit_multiplier=scale, weights=WEIGHTS)
    return interleaved(spec)


def cohere2(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Command R7B or Command A."""
    config.reject("use_qk_norm", False, why="only the first Command R models have norms on queries and keys")
    spec = _cohere(config)
    window = config.nullable_size("sliding_window", DEFAULT_WINDOW)
    if window is None:
        raise config.error("sliding_window must be a number: layers of sliding_attention have it")
    windowed = config.size("sliding_window_pattern", WINDOWED_LAYERS + 1) - 1
    types = config.layer_types(spec.num_layers, windowed=windowed)
    layers = (
        layer.with_attention(**({"window": window} if kind == "sliding_attention" else {"has_rotary": False}))
        for layer, kind in zip(spec.layers, types, strict=True)
    )
    return replace(spec, layers=tuple(layers))
