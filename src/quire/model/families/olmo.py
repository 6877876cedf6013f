"""OLMo 1 to 3: Llama with LayerNorm without weights (Groeneveld et al. 2024), and what came after.

OLMo 2 has norms with weights on the outputs of sublayers and on queries and keys, over all heads (OLMo et al. 2024);
OLMo 3 windows in three of four layers; OLMo Hybrid gated delta nets there, with norms before the sublayers.
"""

from dataclasses import replace
from functools import partial

from quire.kernels.delta_net import MAX_TAPS
from quire.model.config_reader import MAX_HEAD_DIM, ConfigReader
from quire.model.families.qwen3_next import MAX_STATE_HEADS, with_delta_nets
from quire.model.llama import WEIGHTS as LLAMA_WEIGHTS
from quire.model.llama import llama
from quire.model.rope import rotary_of_layer_type
from quire.model.spec import DecoderSpec, DeltaNet

NORM_EPS = 1e-5
DEFAULT_WINDOW = 4096
OLMO3_THETA = 500_000.0
WINDOWED_LAYERS = 3  # before each layer without a window
WEIGHTS = replace(
    LLAMA_WEIGHTS, attention_norm="post_attention_layernorm", feed_forward_norm="post_feedforward_layernorm"
)
HYBRID_WEIGHTS = replace(
    WEIGHTS,
    delta_in=tuple(f"linear_attn.{name}_proj" for name in "qkvg"),
    delta_rates=("linear_attn.b_proj", "linear_attn.a_proj"),
    delta_conv=tuple(f"linear_attn.{name}_conv1d" for name in "qkv"),
    delta_rate="linear_attn.A_log",
    delta_rate_bias="linear_attn.dt_bias",
    delta_norm="linear_attn.o_norm",
    delta_out="linear_attn.o_proj",
    delta_layer_norms=("input_layernorm", "post_attention_layernorm"),
    renamed={
        "attention_layer_norm.weight": "input_layernorm.weight",
        "feedforward_layer_norm.weight": "post_attention_layernorm.weight",
    },
)
DELTA_NORM_EPS = 1e-5  # whatever other norms have
HYBRID_SIZES = {
    "vocab_size": 100_352, "hidden_size": 3840, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 30, "max_position_embeddings": 65_536, "rms_norm_eps": 1e-6,
}  # fmt: skip


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


def olmo_hybrid(config: ConfigReader) -> DecoderSpec:
    """Return the spec of an OLMo Hybrid: gated delta nets, and attention that turns nothing by default."""
    for key, default in HYBRID_SIZES.items():
        config = config.with_default(key, default)
    config.reject("clip_qkv", why="queries, keys and values are not clipped")
    theta = config.section("rope_parameters").get("rope_theta", config.raw("rope_theta"))
    spec = olmo2(config if theta is not None else config.replaced(rope_parameters=None, rope_theta=None))
    spec = spec.with_attention(has_rotary=theta is not None)
    num_heads = config.size("num_attention_heads")
    num_key_heads = config.size("linear_num_key_heads", num_heads, limit=MAX_STATE_HEADS)
    three_quarters = max(1, 3 * spec.hidden_size // (4 * num_key_heads))
    key_dim = config.size("linear_key_head_dim", three_quarters, limit=MAX_HEAD_DIM)
    net = DeltaNet(
        num_key_heads=num_key_heads,
        num_value_heads=config.size("linear_num_value_heads", num_heads, limit=MAX_STATE_HEADS),
        key_dim=key_dim,
        value_dim=config.size("linear_value_head_dim", 2 * key_dim, limit=MAX_HEAD_DIM),
        taps=config.size("linear_conv_kernel_dim", 4, limit=MAX_TAPS),
        max_share=2.0 if config.flag("linear_allow_neg_eigval", True) else 1.0,
        norm_eps=DELTA_NORM_EPS,
    )
    attending = range(WINDOWED_LAYERS, spec.num_layers, WINDOWED_LAYERS + 1) or [spec.num_layers - 1]
    return replace(with_delta_nets(config, spec, net, attending, norm_position="pre"), weights=HYBRID_WEIGHTS)
