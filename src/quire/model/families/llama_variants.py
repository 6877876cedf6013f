"""Families that are Llama with other numbers, names or positions: Granite, GLM-4, Phi, SmolLM3, StableLM."""

from dataclasses import replace
from functools import partial

from quire.model.config_reader import ConfigReader
from quire.model.llama import WEIGHTS as LLAMA_WEIGHTS
from quire.model.llama import llama
from quire.model.spec import DecoderSpec, interleaved


def granite(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Granite without experts."""
    scale, residual = config.number("attention_multiplier", 1.0), config.number("residual_multiplier", 1.0)
    spec = llama(config).with_layers(partial(replace, residual_multiplier=residual))
    spec = spec.with_attention(attention_scale=scale)
    embedding, logit = config.number("embedding_multiplier", 1.0), 1 / config.number("logits_scaling", 1.0)
    return replace(spec, embedding_multiplier=embedding, logit_multiplier=logit)


GLM_HEAD_DIM = 128
GLM_EPS = 1.5625e-7
GLM_WEIGHTS = replace(
    LLAMA_WEIGHTS,
    feed_forward_in=("mlp.gate_up_proj",),
    attention_output_norm="post_self_attn_layernorm",
    feed_forward_output_norm="post_mlp_layernorm",
)


def glm4(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a GLM-4."""
    config.reject("mlp_bias", False, why="its feed-forward has no biases")
    defaults = {"head_dim": GLM_HEAD_DIM, "attention_bias": True, "rms_norm_eps": GLM_EPS, "num_key_value_heads": 2}
    for key, default in defaults.items():
        config = config.with_default(key, default)
    spec = llama(config, partial_rotary=0.5)
    spec = spec.with_layers(partial(replace, norm_position="around")).with_attention(has_attention_out_bias=False)
    return interleaved(replace(spec, weights=GLM_WEIGHTS))


PHI_NORM_EPS = 1e-5
PHI_POSITIONS = 4096
PHI_WEIGHTS = replace(LLAMA_WEIGHTS, qkv=("self_attn.qkv_proj",), feed_forward_in=("mlp.gate_up_proj",))


def phi3(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Phi-3 or Phi-4, mini ones included."""
    config.reject("attention_bias", False, why="its projections have no biases")
    config.reject("mlp_bias", False, why="its projections have no biases")
    config = config.with_default("rms_norm_eps", PHI_NORM_EPS)
    scaling = config.section("rope_scaling") or config.section("rope_parameters")
    if scaling.get("rope_type", scaling.get("type")) in ("su", "yarn"):  # the first names of longrope
        config = config.replaced(rope_scaling={**scaling, "rope_type": "longrope"})
    spec = llama(config.with_default("original_max_position_embeddings", PHI_POSITIONS), partial_rotary=1.0)
    window = config.size("sliding_window") if config.has("sliding_window") else None
    return replace(spec, weights=PHI_WEIGHTS).with_windows((window,) * spec.num_layers)


NO_ROPE_INTERVAL = 4


def smollm3(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a SmolLM3."""
    spec = llama(config.with_default("tie_word_embeddings", True).with_default("num_key_value_heads", 4))
    rotated = config.flags("no_rope_layers", spec.num_layers)
    if rotated is None:
        interval = config.size("no_rope_layer_interval", NO_ROPE_INTERVAL)
        rotated = [(index + 1) % interval != 0 for index in range(spec.num_layers)]
    has_windows = config.flag("use_sliding_window", False) and config.has("sliding_window")
    window = config.size("sliding_window") if has_windows else None
    default = ["full_attention" if each else "sliding_attention" for each in rotated]
    types = config.layer_types(spec.num_layers, default=default)
    layers = (
        layer.with_attention(has_rotary=has_rotary, window=window if kind == "sliding_attention" else None)
        for layer, has_rotary, kind in zip(spec.layers, rotated, types, strict=True)
    )
    return replace(spec, layers=tuple(layers))


STABLELM_ROTARY = 0.25
STABLELM_NORMS = "self_attn.{}_layernorm.norms.{{head}}"


def stablelm(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a StableLM 3B, Zephyr, 2 1.6B or 2 12B."""
    for key in ("attention_bias", "mlp_bias"):
        config.reject(key, False, why="biases are those of use_qkv_bias")
    is_parallel, has_bias = config.flag("use_parallel_residual", False), config.flag("use_qkv_bias", False)
    spec = llama(config, partial_rotary=STABLELM_ROTARY)
    spec = spec.with_layers(partial(replace, is_parallel=is_parallel)).with_attention(has_qkv_bias=has_bias)
    if config.flag("qk_layernorm", False):
        spec = spec.with_attention(has_query_key_norm=True, is_query_key_norm_by_head=True)
    weights = replace(LLAMA_WEIGHTS, query_norm=STABLELM_NORMS.format("q"), key_norm=STABLELM_NORMS.format("k"))
    weights = replace(weights, feed_forward_norm=None) if is_parallel else weights
    return replace(spec, norm="layer", norm_eps=config.number("layer_norm_eps", 1e-5), weights=weights)
