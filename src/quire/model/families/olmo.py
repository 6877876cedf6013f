"""OLMo 1 to 3: Llama with LayerNorm without weights (Groeneveld et al. 2024), and what came after.

OLMo 2 has norms with weights on the outputs of sublayers and on queries and keys, over all heads (OLMo et al. 2024);
OLMo 3 windows in three of four layers.
"""

from dataclasses import replace
from functools import partial

from quire.model.config_reader import ConfigReader
from quire.model.llama import WEIGHTS as LLAMA_WEIGHTS
from quire.model.llama import llama
from quire.model.rope import rotary_of_layer_type
from quire.model.spec import DecoderSpec

NORM_EPS = 1e-5
DEFAULT_WINDOW = 4096
OLMO3_THETA = 500_000.0
WINDOWED_LAYERS = 3  # before each layer without a window
WEIGHTS = replace(
    LLAMA_WEIGHTS, attention_norm="post_attention_layernorm", feed_forward_norm="post_feedforward_layernorm"
)


def olmo(config: ConfigReader) -> DecoderSpec:
    """Return the spec of an OLMo 1."""
    config.reject("mlp_bias", False, why="its feed-forward has no biases")
    limit = config.number("clip_qkv") if config.has("clip_qkv") else 0.0
    spec = llama(config).with_attention(qkv_limit=limit)
    return replace(spec, norm="layer", norm_eps=NORM_EPS, norm_has_weight=False, norm_has_bias=False)


def olmo2(config: ConfigReader) -> DecoderSpec:
    """Return the spec of an OLMo 2."""
    config.reject("mlp_bias", False, why="its feed-forward has no biases")
    config.reject("clip_qkv", why="queries, keys and values are not clipped")
    config = config.with_default("rms_norm_eps", NORM_EPS)
    spec = llama(config).with_attention(has_query_key_norm=True, is_query_key_norm_over_heads=True)
    spec = spec.with_layers(partial(replace, norm_position="output"))
    return replace(spec, norm="rms_float", weights=WEIGHTS)


def olmo3(config: ConfigReader) -> DecoderSpec:
    """Return the spec of an OLMo 3."""
    spec = olmo2(config.replaced(rope_parameters=None, rope_scaling=None))
    theta = config.number("rope_theta", OLMO3_THETA)
    length = spec.max_position_embeddings
    full, windowed = (
        rotary_of_layer_type(config, kind, theta, spec.head_dim, length)
        for kind in ("full_attention", "sliding_attention")
    )
    window = config.nullable_size("sliding_window", DEFAULT_WINDOW)
    types = config.layer_types(spec.num_layers, windowed=WINDOWED_LAYERS)
    return replace(spec, rotary=full).with_windowed_layers(types, window=window, rotary=windowed)
