"""Gemma 1 to 3, their text: norms with 1 + weight, GEGLU, scaled embeddings (Gemma Team 2024).

Gemma 2 adds norms on the outputs of sublayers, softcaps, and windows in every other layer; Gemma 3 norms on query and
key in place of softcaps, and windows in five of six layers, with rotary embeddings of their own.
"""

import math
from dataclasses import replace
from functools import partial

from quire.model.config_reader import ConfigReader
from quire.model.llama import WEIGHTS as LLAMA_WEIGHTS
from quire.model.llama import llama
from quire.model.rope import rotary_of_layer_type
from quire.model.spec import Activation, DecoderSpec

HEAD_DIM = 256
DEFAULT_WINDOW = 4096
DEFAULT_SCALAR = 256  # default of query_pre_attn_scalar
SCORE_SOFTCAP, LOGIT_SOFTCAP = 50.0, 30.0  # Gemma 2, where config.json leaves them out; null means none
FULL_THETA, WINDOWED_THETA = 1_000_000.0, 10_000.0  # Gemma 3
WINDOWED_LAYERS = 5  # Gemma 3, before each layer without a window
ACTIVATIONS: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh_and_mul", "gelu_new": "gelu_tanh_and_mul"}
OLD_ACTIVATIONS = ACTIVATIONS | {"gelu": "gelu_tanh_and_mul"}  # the first name of Gemma 1's activation
AROUND = replace(
    LLAMA_WEIGHTS,
    attention_output_norm="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
    feed_forward_output_norm="post_feedforward_layernorm",
)


def gemma(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Gemma 1."""
    key = "hidden_activation" if config.has("hidden_activation") else "hidden_act"
    return _gemma(config, config.choice(key, OLD_ACTIVATIONS, default="gelu_pytorch_tanh"))


def gemma2(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Gemma 2."""
    spec = _around(config, softcap=config.nullable_number("attn_logit_softcapping", SCORE_SOFTCAP))
    spec = replace(spec, logit_softcap=config.nullable_number("final_logit_softcapping", LOGIT_SOFTCAP))
    window = config.nullable_size("sliding_window", DEFAULT_WINDOW)
    return spec.with_windowed_layers(config.layer_types(spec.num_layers, windowed=1), window=window)


def gemma3_text(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Gemma 3 for text."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        config.reject(key, why="Gemma 3 has norms on queries and keys in place of softcaps")
    plain = config.replaced(rope_scaling=None, rope_parameters=None)
    spec = _around(plain).with_attention(has_query_key_norm=True)
    length, head_dim = config.size("max_position_embeddings"), spec.head_dim
    full = rotary_of_layer_type(config, "full_attention", config.number("rope_theta", FULL_THETA), head_dim, length)
    theta = config.number("rope_local_base_freq", WINDOWED_THETA)
    windowed = rotary_of_layer_type(config, "sliding_attention", theta, head_dim, length)
    window = config.nullable_size("sliding_window", DEFAULT_WINDOW)
    num_windowed = config.size("sliding_window_pattern", WINDOWED_LAYERS + 1) - 1
    types = config.layer_types(spec.num_layers, windowed=num_windowed)
    full = replace(full, max_positions=length)  # the config states the scaled length
    spec = replace(spec, rotary=full, max_position_embeddings=length)
    return spec.with_windowed_layers(types, window=window, rotary=windowed)


def _gemma(config: ConfigReader, activation: Activation) -> DecoderSpec:
    config.reject("use_bidirectional_attention", False, why="attention is causal")
    config = config.with_default("head_dim", HEAD_DIM).with_default("tie_word_embeddings", True)
    spec = llama(config, activation=activation)
    multiplier = math.sqrt(spec.hidden_size)
    return replace(
        spec, norm="rms_offset", embedding_multiplier=multiplier, is_embedding_multiplier_rounded=True
    )


def _around(config: ConfigReader, softcap: float = 0.0) -> DecoderSpec:
    spec = _gemma(config, config.choice("hidden_activation", ACTIVATIONS, default="gelu_pytorch_tanh"))
    scale = config.number("query_pre_attn_scalar", DEFAULT_SCALAR) ** -0.5
    spec = replace(spec, weights=AROUND).with_attention(attention_scale=scale, softcap=softcap)
    return spec.with_layers(partial(replace, norm_position="around"))
