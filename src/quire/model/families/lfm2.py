"""LFM2: gated short convolutions in most layers, attention in the others, dense or with experts (Liquid AI 2025)."""

from dataclasses import replace

from quire.kernels.short_conv import MAX_TAPS
from quire.model.config_reader import ConfigReader
from quire.model.llama import WEIGHTS as LLAMA_WEIGHTS
from quire.model.llama import llama
from quire.model.spec import (
    MAX_EXPERTS,
    DecoderSpec,
    ExpertNames,
    Experts,
    FeedForward,
    ShortConv,
    StackedTensor,
)

NORM_EPS = 1e-5
THETA = 1_000_000.0
POSITIONS = 128_000
TAPS = 3
LAYER_TYPES = ("conv", "full_attention")
_W1, _W2, _W3 = (f"feed_forward.experts.{{expert}}.w{number}" for number in (1, 2, 3))
WEIGHTS = replace(
    LLAMA_WEIGHTS,
    attention_norm="operator_norm",
    attention_out="self_attn.out_proj",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    conv_in="conv.in_proj",
    conv="conv.conv",
    conv_out="conv.out_proj",
    feed_forward_norm="ffn_norm",
    feed_forward_in=("feed_forward.w1", "feed_forward.w3"),
    feed_forward_out="feed_forward.w2",
    final_norm="embedding_norm",
    experts=ExpertNames(
        router="feed_forward.gate",
        router_bias="feed_forward.expert_bias",
        expert_in=(_W1, _W3),
        expert_out=_W2,
        stacked=(
            StackedTensor("feed_forward.experts.gate_up_proj", (f"{_W1}.weight", f"{_W3}.weight")),
            StackedTensor("feed_forward.experts.down_proj", (f"{_W2}.weight",)),
        ),
    ),
)


def lfm2(config: ConfigReader) -> DecoderSpec:
    """Return the spec of an LFM2: short convolutions, and attention in some layers (Liquid AI 2025)."""
    size = config.size("block_ff_dim" if config.has("block_ff_dim") else "intermediate_size", 12_288)
    if config.flag("block_auto_adjust_ff_dim", True):
        size = 2 * size // 3
        if not config.is_null("block_ffn_dim_multiplier"):
            multiple = config.size("block_multiple_of", 256)
            size = int(config.number("block_ffn_dim_multiplier", 1.0) * size)
            size = -(-size // multiple) * multiple
    return _lfm2(config.replaced(intermediate_size=size))


def lfm2_moe(config: ConfigReader) -> DecoderSpec:
    """Return the spec of an LFM2 with experts, in all layers but the first ones (Liquid AI 2025)."""
    spec = _lfm2(config.with_default("intermediate_size", 7168))
    num_experts = config.size("num_experts", 32, limit=MAX_EXPERTS)
    mixture = Experts(
        num_experts=num_experts,
        num_active=config.size("num_experts_per_tok", 4, limit=num_experts),
        expert=FeedForward(config.size("moe_intermediate_size", 1792), "silu_and_mul"),
        is_normalized=config.flag("norm_topk_prob", True),
        is_sigmoid=True,
        has_choice_bias=config.flag("use_expert_bias", True),
        factor=config.number("routed_scaling_factor", 1.0),
    )
    first = config.size("num_dense_layers", 2, least=0)
    layers = (*spec.layers[:first], *(replace(layer, feed_forward=mixture) for layer in spec.layers[first:]))
    return replace(spec, layers=layers)


def _lfm2(config: ConfigReader) -> DecoderSpec:
    """Return the spec of both, with dense feed-forwards."""
    hidden_size, has_bias = config.size("hidden_size"), config.flag("conv_bias", False)
    for key in ("conv_dim", "conv_dim_out"):
        config.reject(key, hidden_size, why="convolutions are as wide as hidden states")
    config.reject("use_pos_enc", True, why="attention has rotary positions")
    tied_key = "tie_embedding" if config.has("tie_embedding") else "tie_word_embeddings"
    defaults = {"num_key_value_heads": 8, "max_position_embeddings": POSITIONS, "rope_theta": THETA}
    changed = config.replaced(
        rms_norm_eps=config.number("norm_eps", NORM_EPS), attention_bias=False, mlp_bias=False, hidden_act="silu",
        tie_word_embeddings=config.flag(tied_key, True),
    )  # fmt: skip
    for key, default in defaults.items():
        changed = changed.with_default(key, default)
    spec = replace(llama(changed), weights=WEIGHTS).with_attention(has_query_key_norm=True)
    conv = ShortConv(hidden_size, config.size("conv_L_cache", TAPS, limit=MAX_TAPS), has_bias)
    types = _layer_types(config, spec.num_layers)
    pairs = zip(spec.layers, types, strict=True)
    layers = (replace(layer, mixer=conv) if kind == "conv" else layer for layer, kind in pairs)
    return replace(spec, layers=tuple(layers))


def _layer_types(config: ConfigReader, num_layers: int) -> list[str]:
    """Return `layer_types`, or what `full_attn_idxs` says in older files; without either all layers are attention."""
    found = config.strings("layer_types", LAYER_TYPES)
    if found and len(found) != num_layers:
        raise config.error(f"layer_types has {len(found)} entries for {num_layers} layers")
    if found or not config.has("full_attn_idxs"):
        return found or [LAYER_TYPES[1]] * num_layers
    attending = config.indices("full_attn_idxs", num_layers)
    return [LAYER_TYPES[index in attending] for index in range(num_layers)]
