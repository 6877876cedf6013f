"""Mixtures of experts: Mixtral, OLMoE, Qwen2 and Qwen3, GLM-4.5 to 4.7, MiniMax-M2, dots.llm1 and ERNIE 4.5.

Llama with a router in place of the feed-forward (Shazeer et al. 2017; Jiang et al. 2024). Noise on the router's scores
and losses of its balance are of training alone. The last four choose by weights plus biases that balance the experts
(Wang et al. 2024), as DeepSeek V3 does, and add an expert that all tokens use.
"""

from collections.abc import Sequence
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
    WeightMap,
    interleaved,
    with_mtp,
)

MIXTRAL_THETA = 1_000_000.0
MINIMAX_THETA = 5_000_000.0
MINIMAX_HEAD_DIM = 128
ERNIE_THETA = 500_000.0
NORM_EPS = 1e-5  # Mixtral and OLMoE
DEFAULT_LAST_WINDOWED = 28
MAX_MTP_LAYERS = 8
WEIGHTS = replace(LLAMA_WEIGHTS, experts=ExpertNames())
W1, W2, W3 = (f"block_sparse_moe.experts.{{expert}}.w{number}" for number in (1, 2, 3))
MIXTRAL_EXPERTS = ExpertNames(
    router="block_sparse_moe.gate",
    expert_in=(W1, W3),
    expert_out=W2,
    stacked=(
        StackedTensor("mlp.experts.gate_up_proj", (f"{W1}.weight", f"{W3}.weight")),
        StackedTensor("mlp.experts.down_proj", (f"{W2}.weight",)),
    ),
    stacked_names={"mlp.gate.weight": "block_sparse_moe.gate.weight"},
)
MIXTRAL_WEIGHTS = replace(WEIGHTS, experts=MIXTRAL_EXPERTS)
SHARED = ExpertNames(
    shared_in=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"), shared_out="mlp.shared_experts.down_proj"
)
_OWN_BIAS, _STACKED_BIAS = "block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias"
MINIMAX_WEIGHTS = replace(
    MIXTRAL_WEIGHTS,
    experts=replace(
        MIXTRAL_EXPERTS, router_bias=_OWN_BIAS,
        stacked_names={**MIXTRAL_EXPERTS.stacked_names, _STACKED_BIAS: _OWN_BIAS},
    ),
)  # fmt: skip
ERNIE_BIAS = "mlp.moe_statics.e_score_correction_bias"
ERNIE_WEIGHTS = replace(
    LLAMA_WEIGHTS,
    experts=replace(
        SHARED, router_bias=ERNIE_BIAS, is_bias_row=True,
        stacked_names={"mlp.gate.moe_statics.e_score_correction_bias": ERNIE_BIAS},
    ),
    skipped=("mtp_",),
)  # fmt: skip


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
    spec = replace(spec, weights=WEIGHTS).with_layers(partial(replace, feed_forward=mixture))
    return spec.with_attention(qkv_limit=limit, has_query_key_norm=True, is_query_key_norm_over_heads=True)


def qwen2_moe(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Qwen2 with experts, one of them shared by all tokens (Yang et al. 2024)."""
    config.reject("attention_bias", False, why="biases are those of qkv_bias")
    spec, has_bias = _llama_without_mlp_bias(config), config.flag("qkv_bias", True)
    is_normalized = config.flag("norm_topk_prob", False)
    mixture = shared_experts(config, 60, 4, 1408, shared_size=5632, is_normalized=is_normalized)
    window, last = _qwen_window(config), config.size("max_window_layers", DEFAULT_LAST_WINDOWED, least=0)
    default = [LAYER_TYPES[index % 2 if index < last else 1] for index in range(spec.num_layers)]
    types = config.layer_types(spec.num_layers, default=default)
    spec = spec.with_windows([window if kind == LAYER_TYPES[0] else None for kind in types])
    return with_experts(config, spec.with_attention(has_qkv_bias=has_bias), mixture)


def qwen3_moe(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Qwen3 with experts (2025)."""
    spec = _llama_without_mlp_bias(config)
    spec = spec.with_windows((_qwen_window(config),) * spec.num_layers)
    mixture = _qwen_experts(config, 128, 8, 768)
    return with_experts(config, spec.with_attention(has_query_key_norm=True), mixture)


def glm4_moe(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a GLM-4.5, 4.6 or 4.7 (Zhipu AI 2025): half of a head's dimensions are rotated."""
    spec = _llama_without_mlp_bias(config.with_default("rms_norm_eps", NORM_EPS), partial_rotary=0.5)
    has_norms = config.flag("use_qk_norm", False)
    spec = spec.with_attention(has_attention_out_bias=False, has_query_key_norm=has_norms)
    spec = with_biased_experts(config, spec, num_experts=128, num_active=8, num_dense=1, is_normalized=True)
    return with_later_layer(config, spec)


def dots1(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a dots.llm1 (Huo et al. 2025)."""
    spec = _llama_without_mlp_bias(config).with_attention(has_query_key_norm=True)
    window = config.nullable_size("sliding_window", DEFAULT_WINDOW)
    last_full = config.size("max_window_layers", spec.num_layers, least=0)
    default = [LAYER_TYPES[1 if window is None or index < last_full else 0] for index in range(spec.num_layers)]
    types = config.layer_types(spec.num_layers, default=default)
    spec = spec.with_windows([window if kind == LAYER_TYPES[0] else None for kind in types])
    return with_biased_experts(config, spec, num_dense=0, is_normalized=False)


def minimax_m2(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a MiniMax-M2 (2025): norms over all heads, a part of a head's dimensions is rotated."""
    config = config.with_default("rope_theta", MINIMAX_THETA).with_default("head_dim", MINIMAX_HEAD_DIM)
    config.reject("attention_bias", False, why="its projections have no biases")
    if config.has("rotary_dim"):
        head_dim = config.size("head_dim")
        part = config.size("rotary_dim", limit=head_dim) / head_dim
        config = config.with_default("partial_rotary_factor", part)
    spec = _llama_without_mlp_bias(config, partial_rotary=1.0)
    mixture = _experts(config, 256, 8, config.size("intermediate_size"), is_normalized=True)
    mixture = replace(mixture, is_sigmoid=True, has_choice_bias=True)
    spec = replace(spec, weights=without_later_layers(MINIMAX_WEIGHTS, spec.num_layers))
    spec = spec.with_attention(has_query_key_norm=True, is_query_key_norm_over_heads=True)
    return spec.with_layers(partial(replace, feed_forward=mixture))


def ernie4_5_moe(config: ConfigReader) -> DecoderSpec:
    """Return the spec of an ERNIE 4.5 with experts (Baidu 2025), of text: positions on interleaved pairs."""
    config.reject("use_bias", False, why="its experts have no biases")
    config = config.with_default("rms_norm_eps", NORM_EPS).with_default("rope_theta", ERNIE_THETA)
    spec = interleaved(_llama_without_mlp_bias(config.with_default("tie_word_embeddings", True)))
    size, num_shared = config.size("moe_intermediate_size", 1536), config.size("moe_num_shared_experts", 2, least=0)
    num_experts = config.size("moe_num_experts", 64, limit=MAX_EXPERTS)
    num_active = config.size("moe_k", 6, limit=num_experts)
    mixture = Experts(
        num_experts, num_active, FeedForward(size, _activation(config)), is_normalized=True, has_choice_bias=True,
        shared=FeedForward(num_shared * size, _activation(config)) if num_shared else None, is_shared_scored=False,
    )  # fmt: skip
    first, interval = config.size("moe_layer_start_index", 1, least=0), config.size("moe_layer_interval", 1)
    last = config.size("moe_layer_end_index", -1, least=-1)
    last = spec.num_layers - 1 if last == -1 else last
    layers = [
        replace(layer, feed_forward=mixture) if first <= index <= last and not (index + 1) % interval else layer
        for index, layer in enumerate(spec.layers)
    ]
    return replace(spec, layers=tuple(layers), weights=ERNIE_WEIGHTS)


def with_biased_experts(
    config: ConfigReader, spec: DecoderSpec, *, num_dense: int, is_normalized: bool, num_experts: int | None = None,
    num_active: int | None = None, kinds: Sequence[str] = (),
) -> DecoderSpec:  # fmt: skip
    """Return a spec with a router as DeepSeek V3's in all layers but the first ones (DeepSeek-AI 2024).

    Weights are sigmoids; experts are chosen by weights plus biases, from the best groups. The numbers are defaults;
    None: the config has to have it. `kinds`: which layers are `sparse`, if not all behind the first ones.
    """
    activation, size = _activation(config), config.size("moe_intermediate_size", 1408)
    num_experts = config.size("n_routed_experts", num_experts, limit=MAX_EXPERTS)
    num_shared = config.size("n_shared_experts", 1)
    mixture = Experts(
        num_experts=num_experts,
        num_active=config.size("num_experts_per_tok", num_active, limit=num_experts),
        expert=FeedForward(size, activation),
        is_normalized=config.flag("norm_topk_prob", is_normalized),
        shared=FeedForward(num_shared * size, activation),
        is_shared_scored=False,
        is_sigmoid=True,
        has_choice_bias=True,
        factor=config.number("routed_scaling_factor", 1.0),
        num_groups=config.size("n_group", 1, limit=num_experts),
        num_kept_groups=config.size("topk_group", 1, limit=num_experts),
    )
    spec = with_later_experts(config, spec, mixture, num_dense, kinds)
    return replace(spec, weights=without_later_layers(replace(spec.weights, experts=SHARED), spec.num_layers))


def with_later_experts(
    config: ConfigReader, spec: DecoderSpec, mixture: Experts, num_dense: int, kinds: Sequence[str] = ()
) -> DecoderSpec:
    """Return a spec with experts in all layers but the first ones, or in those of `kinds` that are `sparse`."""
    first = config.size("first_k_dense_replace", num_dense, least=0)
    if kinds and len(kinds) != spec.num_layers:
        raise config.error(f"mlp_layer_types has {len(kinds)} entries for {spec.num_layers} layers")
    is_sparse = [kind == "sparse" for kind in kinds] or [index >= first for index in range(spec.num_layers)]
    pairs = zip(spec.layers, is_sparse, strict=True)
    return replace(
        spec, layers=tuple(replace(layer, feed_forward=mixture) if sparse else layer for layer, sparse in pairs)
    )


def without_later_layers(weights: WeightMap, num_layers: int) -> WeightMap:
    """Return names without those of layers behind the last one, which predict later tokens (MTP)."""
    return replace(weights, skipped=tuple(f".layers.{num_layers + index}." for index in range(MAX_MTP_LAYERS)))


def with_later_layer(config: ConfigReader, spec: DecoderSpec) -> DecoderSpec:
    """Return the spec with the MTP head that is the layer behind the last one, if the config says that there is one."""
    if not config.size("num_nextn_predict_layers", 0, least=0, limit=MAX_LAYERS):
        return spec
    prefixes = tuple(f"{prefix}layers.{spec.num_layers}." for prefix in spec.weights.prefixes)
    return with_mtp(
        spec, prefixes=prefixes, layer="", mtp_norms=("enorm", "hnorm"), mtp_projection="eh_proj",
        final_norm="shared_head.norm",
    )  # fmt: skip


def _llama_without_mlp_bias(config: ConfigReader, *, partial_rotary: float | None = None) -> DecoderSpec:
    config.reject("mlp_bias", False, why="its experts have no biases")
    return llama(config, partial_rotary=partial_rotary)


def _activation(config: ConfigReader) -> Activation:
    return config.choice("hidden_act", ACTIVATIONS, default="silu")


def _experts(config: ConfigReader, num_experts: int, num_active: int, size: int, *, is_normalized: bool) -> Experts:
    """Return the mixture of a config; counts are defaults. transformers 5 writes num_local_experts for num_experts."""
    key = "num_local_experts" if config.has("num_local_experts") else "num_experts"
    num_experts = config.size(key, num_experts, limit=MAX_EXPERTS)
    num_active = config.size("num_experts_per_tok", num_active, limit=num_experts)
    return Experts(num_experts, num_active, FeedForward(size, _activation(config)), is_normalized)


def shared_experts(
    config: ConfigReader, num_experts: int, num_active: int, size: int = 512, *, shared_size: int = 512,
    is_normalized: bool,
) -> Experts:  # fmt: skip
    """Return a Qwen's mixture with an expert that all tokens use, times a sigmoid; the numbers are defaults."""
    size, shared = (
        config.size("moe_intermediate_size", size), config.size("shared_expert_intermediate_size", shared_size)
    )
    mixture = _experts(config, num_experts, num_active, size, is_normalized=is_normalized)
    return replace(mixture, shared=FeedForward(shared, _activation(config)))


def _qwen_experts(config: ConfigReader, num_experts: int, num_active: int, size: int) -> Experts:
    is_normalized = config.flag("norm_topk_prob", False)
    size = config.size("moe_intermediate_size", size)
    return _experts(config, num_experts, num_active, size, is_normalized=is_normalized)


def _qwen_window(config: ConfigReader) -> int | None:
    """Return the window of the layers that have one; None unless switched on."""
    return config.nullable_size("sliding_window", DEFAULT_WINDOW) if config.flag("use_sliding_window", False) else None


def with_experts(config: ConfigReader, spec: DecoderSpec, mixture: Experts) -> DecoderSpec:
    """Return a Qwen's spec with experts in all layers but those of `mlp_only_layers`, or in every so many."""
    dense = config.indices("mlp_only_layers", spec.num_layers)
    step = config.size("decoder_sparse_step", 1, limit=MAX_LAYERS)
    layers = [
        layer if index in dense or (index + 1) % step else replace(layer, feed_forward=mixture)
        for index, layer in enumerate(spec.layers)
    ]
    return replace(spec, layers=tuple(layers), weights=WEIGHTS)
