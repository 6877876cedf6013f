"""Mixtures of experts: Mixtral, OLMoE, and Qwen2 and Qwen3 with experts.

Llama with a router in place of the feed-forward (Shazeer et al. 2017; Jiang et al. 2024). Noise on the router's scores
and losses of its balance are of training alone.
"""

from dataclasses import replace
from functools import partial

from quire.model.config_reader import LAYER_TYPES, MAX_LAYERS, ConfigReader
from quire.model.llama import ACTIVATIONS, DEFAULT_WINDOW, llama
from quire.model.llama import WEIGHTS as LLAMA_WEIGHTS
from quire.model.spec import (
    MAX_EXPERTS,
    Activation,
    DecoderSpec,
    ExpertNames,
    Experts,
    FeedForward,
    StackedTensor,
)

MIXTRAL_THETA = 1_000_000.0
NORM_EPS = 1e-5  # Mixtral and OLMoE
DEFAULT_LAST_WINDOWED = 28
WEIGHTS = replace(LLAMA_WEIGHTS, experts=ExpertNames())
W1, W2, W3 = (f"block_sparse_moe.experts.{{expert}}.w{number}" for number in (1, 2, 3))
MIXTRAL_WEIGHTS = replace(
    WEIGHTS,
    experts=ExpertNames(
        router="block_sparse_moe.gate",
        expert_in=(W1, W3),
        expert_out=W2,
        stacked=(
            StackedTensor("mlp.experts.gate_up_proj", (f"{W1}.weight", f"{W3}.weight")),
            StackedTensor("mlp.experts.down_proj", (f"{W2}.weight",)),
        ),
        stacked_names={"mlp.gate.weight": "block_sparse_moe.gate.weight"},
    ),
)


def mixtral(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Mixtral (Jiang et al. 2024)."""
    config.reject("attention_bias", False, why="its projections have no biases")
    config = config.with_default("rms_norm_eps", NORM_EPS).with_default("rope_theta", MIXTRAL_THETA)
    spec = _llama_without_mlp_bias(config)
    window = config.size("sliding_window") if config.has("sliding_window") else None
    mixture = _experts(config, 8, 2, config.size("intermediate_size"), is_normalized=True)
    spec = replace(spec, weights=MIXTRAL_WEIGHTS).with_windows((window,) * spec.num_layers)
    return spec.with_layers(lambda layer: replace(layer, feed_forward=mixture))


def olmoe(config: ConfigReader) -> DecoderSpec:
    """Return the spec of an OLMoE: norms on queries and keys, over all heads (Muennighoff et al. 2024)."""
    limit = config.number("clip_qkv") if config.has("clip_qkv") else 0.0
    spec = _llama_without_mlp_bias(config.with_default("rms_norm_eps", NORM_EPS))
    is_normalized = config.flag("norm_topk_prob", False)
    mixture = _experts(config, 64, 8, config.size("intermediate_size"), is_normalized=is_normalized)
    norms = {"has_query_key_norm": True, "is_query_key_norm_over_heads": True}
    return replace(spec, weights=WEIGHTS).with_layers(
        partial(replace, feed_forward=mixture, qkv_limit=limit, **norms)
    )


def qwen2_moe(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Qwen2 with experts, one of them shared by all tokens (Yang et al. 2024)."""
    config.reject("attention_bias", False, why="biases are those of qkv_bias")
    spec, has_bias = _llama_without_mlp_bias(config), config.flag("qkv_bias", True)
    shared = FeedForward(config.size("shared_expert_intermediate_size", 5632), _activation(config))
    mixture = replace(_qwen_experts(config, 60, 4, 1408), shared=shared)
    window, last = _qwen_window(config), config.size("max_window_layers", DEFAULT_LAST_WINDOWED, least=0)
    default = [LAYER_TYPES[index % 2 if index < last else 1] for index in range(spec.num_layers)]
    types = config.layer_types(spec.num_layers, default=default)
    spec = spec.with_windows([window if kind == LAYER_TYPES[0] else None for kind in types])
    return _with_experts(config, spec.with_layers(partial(replace, has_qkv_bias=has_bias)), mixture)


def qwen3_moe(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Qwen3 with experts (2025)."""
    spec = _llama_without_mlp_bias(config)
    spec = spec.with_windows((_qwen_window(config),) * spec.num_layers)
    mixture = _qwen_experts(config, 128, 8, 768)
    return _with_experts(config, spec.with_layers(partial(replace, has_query_key_norm=True)), mixture)


def _llama_without_mlp_bias(config: ConfigReader) -> DecoderSpec:
    config.reject("mlp_bias", False, why="its experts have no biases")
    return llama(config)


def _activation(config: ConfigReader) -> Activation:
    return config.choice("hidden_act", ACTIVATIONS, default="silu")


def _experts(config: ConfigReader, num_experts: int, num_active: int, size: int, *, is_normalized: bool) -> Experts:
    """Return the mixture of a config; counts are defaults. transformers 5 writes num_local_experts for num_experts."""
    key = "num_local_experts" if config.has("num_local_experts") else "num_experts"
    num_experts = config.size(key, num_experts, limit=MAX_EXPERTS)
    num_active = config.size("num_experts_per_tok", num_active, limit=num_experts)
    return Experts(num_experts, num_active, FeedForward(size, _activation(config)), is_normalized)


def _qwen_experts(config: ConfigReader, num_experts: int, num_active: int, size: int) -> Experts:
    is_normalized = config.flag("norm_topk_prob", False)
    size = config.size("moe_intermediate_size", size)
    return _experts(config, num_experts, num_active, size, is_normalized=is_normalized)


def _qwen_window(config: ConfigReader) -> int | None:
    """Return the window of the layers that have one; None unless switched on."""
    return config.nullable_size("sliding_window", DEFAULT_WINDOW) if config.flag("use_sliding_window", False) else None


def _with_experts(config: ConfigReader, spec: DecoderSpec, mixture: Experts) -> DecoderSpec:
    """Return a Qwen's spec with experts in all layers but those of `mlp_only_layers`, or in every so many."""
    dense = config.indices("mlp_only_layers", spec.num_layers)
    step = config.size("decoder_sparse_step", 1, limit=MAX_LAYERS)
    layers = [
        layer if index in dense or (index + 1) % step else replace(layer, feed_forward=mixture)
        for index, layer in enumerate(spec.layers)
    ]
    return replace(spec, layers=tuple(layers), weights=WEIGHTS)
