"""Attention over latents: DeepSeek V2 to V3.2, Kimi K2, Moonlight, GLM-4.7-Flash, GLM-5 and Mistral 4.

DeepSeek-AI 2024 (V2, section 2.1; V3, section 2.1.2). Sparse attention (DeepSeek-AI 2025) sees all tokens of a context
that has no more of them than it chooses, and has the results of V3 there; longer contexts are not served.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from quire.model.config_reader import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, ConfigReader
from quire.model.families.mixture import SHARED, with_biased_experts, with_later_layer, without_later_layers
from quire.model.llama import ACTIVATIONS
from quire.model.llama import WEIGHTS as LLAMA_WEIGHTS
from quire.model.rope import rotary_from_config
from quire.model.spec import MAX_EXPERTS, Activation, DecoderSpec, Experts, FeedForward, LatentAttention, LayerSpec

WEIGHTS = replace(
    LLAMA_WEIGHTS,
    query_norm="self_attn.q_a_layernorm",
    key_norm="self_attn.kv_a_layernorm",
    query_up="self_attn.q_b_proj",
    kv_up=("self_attn.kv_b_proj",),
    experts=SHARED,
)
V3_SIZES = {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5}
LAYER_KINDS = "dense", "sparse"


def deepseek_v2(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a DeepSeek V2, or V2-Lite: the experts' weights are a softmax over all."""
    config.reject("mlp_bias", False, why="its experts have no biases")
    config.reject("norm_topk_prob", False, why="the weights of its experts are not normalized")
    config.choice("scoring_func", {"softmax": True}, "softmax")
    has_groups = config.choice("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
    groups = ("n_group", "topk_group") if has_groups else ()
    mixture = replace(_experts(config, groups, is_normalized=False), num_group_keys=1)
    return _with_experts(config, latent_model(config, is_interleaved=True), mixture, num_dense=0)


def deepseek_v3(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a DeepSeek V3, R1 or V3.1, a Kimi K2 or a Moonlight."""
    for key, default in V3_SIZES.items():
        config = config.with_default(key, default)
    config.choice("scoring_func", {"sigmoid": True}, "sigmoid")
    config.choice("topk_method", {"noaux_tc": True}, "noaux_tc")
    config.reject("moe_layer_freq", 1, why="every layer behind the dense ones has experts")
    spec = latent_model(config, is_interleaved=config.flag("rope_interleave", True))
    spec = with_biased_experts(config, spec, num_experts=256, num_dense=3, is_normalized=True)
    return with_later_layer(config, spec)


def deepseek_v32(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a DeepSeek V3.2 up to `index_topk` tokens of context."""
    config.reject("mlp_bias", False, why="its experts have no biases")
    for key, default in V3_SIZES.items():
        config = config.with_default(key, default)
    return _dense_part(config, num_dense=3)


def glm_moe_dsa(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a GLM-5 up to `index_topk` tokens of context."""
    config.reject("mlp_bias", False, why="its experts have no biases")
    return _dense_part(config.with_default("rms_norm_eps", 1e-5), num_dense=3)


def _dense_part(config: ConfigReader, *, num_dense: int) -> DecoderSpec:
    """Return the spec of a model of sparse attention, of contexts in which it sees all tokens."""
    config.choice("scoring_func", {"sigmoid": True}, "sigmoid")
    config.choice("topk_method", {"noaux_tc": True}, "noaux_tc")
    config.reject("moe_layer_freq", 1, why="every layer behind the dense ones has experts")
    spec = latent_model(config, is_interleaved=config.flag("rope_interleave", True))
    kinds = config.strings("mlp_layer_types", LAYER_KINDS)
    spec = with_biased_experts(
        config, spec, num_experts=256, num_active=8, num_dense=num_dense, is_normalized=True, kinds=kinds
    )
    assert spec.rotary is not None
    longest = min(spec.max_position_embeddings, config.size("index_topk", 2048))
    weights = replace(spec.weights, skipped=(*spec.weights.skipped, ".indexer."))
    spec = replace(
        spec, rotary=replace(spec.rotary, max_positions=longest), weights=weights,
        positions_reason="sparse attention over more than index_topk tokens is not computed",
    )  # fmt: skip
    return with_later_layer(config, spec)


def glm4_moe_lite(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a GLM-4.7-Flash (Zhipu AI 2026)."""
    config = config.with_default("rms_norm_eps", 1e-5)
    config.choice("topk_method", {"noaux_tc": True}, "noaux_tc")
    spec = latent_model(config, is_interleaved=config.flag("rope_interleave", True))
    kinds = config.strings("mlp_layer_types", LAYER_KINDS)
    spec = with_biased_experts(config, spec, num_experts=64, num_active=4, num_dense=1, is_normalized=True, kinds=kinds)
    return with_later_layer(config, spec)


def mistral4(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Mistral 4 (Mistral AI 2026): queries grow with their position."""
    rope = dict(config.section("rope_parameters") or config.section("rope_scaling"))
    rope.pop("partial_rotary_factor", None)  # it says what qk_rope_head_dim says
    config = config.replaced(rope_parameters=rope, rope_scaling=None)
    spec = latent_model(config, is_interleaved=config.flag("rope_interleave", True))
    reader = config.nested("rope_parameters", rope)
    if reader.has("llama_4_scaling_beta"):
        beta, length = reader.number("llama_4_scaling_beta"), reader.size("original_max_position_embeddings")
        spec = spec.with_attention(position_scale=(beta, length))
    groups = ("n_group", "topk_group")
    mixture = _experts(config, groups, is_normalized=config.flag("norm_topk_prob", True))
    return _with_experts(config, spec, mixture, num_dense=0)


def latent_model(config: ConfigReader, *, is_interleaved: bool = False, has_rotary: bool = True) -> DecoderSpec:
    """Return the spec with dense feed-forwards in all layers."""
    config.reject("attention_bias", False, why="its projections have no biases")
    num_heads, num_layers = config.size("num_attention_heads"), config.size("num_hidden_layers", limit=MAX_LAYERS)
    latent_dim, rope_dim, nope_dim, value_dim = (
        config.size(key, limit=MAX_HEAD_DIM)
        for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    max_positions = config.size("max_position_embeddings", limit=MAX_POSITIONS)
    rank = config.size("q_lora_rank") if config.has("q_lora_rank") else 0
    latent = LatentAttention(
        num_heads=num_heads, num_kv_heads=1, head_dim=latent_dim + rope_dim, latent_dim=latent_dim, query_rank=rank,
        nope_dim=nope_dim, expanded_dim=value_dim,
        attention_scale=(nope_dim + rope_dim) ** -0.5 * (_sharpness(config) ** 2 if has_rotary else 1.0),
        has_rotary=has_rotary,
    )  # fmt: skip
    rotary = rotary_from_config(config, rope_dim, max_positions) if has_rotary else None
    layer = LayerSpec(latent, FeedForward(config.size("intermediate_size"), _activation(config)))
    queries = "self_attn.q_a_proj" if rank else "self_attn.q_proj"
    weights = replace(WEIGHTS, qkv=(queries, "self_attn.kv_a_proj_with_mqa"))
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        layers=(layer,) * num_layers,
        max_position_embeddings=max_positions,
        norm="rms",
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rotary=None if rotary is None else replace(rotary, is_interleaved=is_interleaved),
        is_head_tied=config.flag("tie_word_embeddings", False),
        weights=without_later_layers(weights, num_layers),
    )


def _sharpness(config: ConfigReader) -> float:
    """Return the factor of YaRN on both queries and keys, all of their dimensions (Peng et al. 2023, section 3.4)."""
    section = config.section("rope_scaling") or config.section("rope_parameters")
    rope = config.nested("rope parameters", section)
    kind = rope.raw("rope_type") or rope.raw("type") or "default"
    if kind == "default" or not rope.raw("mscale_all_dim"):
        return 1.0
    factor = rope.number("factor")
    return 0.1 * rope.number("mscale_all_dim") * math.log(factor) + 1.0 if factor > 1 else 1.0


def _activation(config: ConfigReader) -> Activation:
    return config.choice("hidden_act", ACTIVATIONS, default="silu")


def _experts(config: ConfigReader, groups: Sequence[str], *, is_normalized: bool) -> Experts:
    """Return the mixture of a config, weighted by a softmax; `groups`: the keys of groups, if there are any."""
    num_experts = config.size("n_routed_experts", limit=MAX_EXPERTS)
    size, num_shared = config.size("moe_intermediate_size"), config.size("n_shared_experts")
    num_groups, num_kept = (config.size(key, 1, limit=num_experts) for key in groups) if groups else (1, 1)
    return Experts(
        num_experts=num_experts,
        num_active=config.size("num_experts_per_tok", limit=num_experts),
        expert=FeedForward(size, _activation(config)),
        is_normalized=is_normalized,
        shared=FeedForward(num_shared * size, _activation(config)),
        is_shared_scored=False,
        factor=config.number("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        num_kept_groups=num_kept,
    )


def _with_experts(config: ConfigReader, spec: DecoderSpec, mixture: Experts, *, num_dense: int) -> DecoderSpec:
    """Return the spec with experts in all layers but the first ones."""
    config.reject("moe_layer_freq", 1, why="every layer behind the dense ones has experts")
    first = config.size("first_k_dense_replace", num_dense, least=0)
    return replace(spec, layers=(
        *spec.layers[:first], *(replace(layer, feed_forward=mixture) for layer in spec.layers[first:])
    ))  # fmt: skip
