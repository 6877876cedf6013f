"""Llama 1 to 3: RMSNorm, rotary positions, gated feed-forward, grouped queries (Touvron et al. 2023).

Mistral and Qwen are Llama with a few fields changed: biases, norms on query and key, windows to look back on.
"""

from collections.abc import Callable
from dataclasses import replace

from quire.model.config_reader import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, ConfigReader
from quire.model.rope import rotary_from_config
from quire.model.spec import Activation, Attention, DecoderSpec, FeedForward, LayerSpec, WeightMap

DEFAULT_WINDOW = 4096  # where config.json leaves the key out; null means no window
DEFAULT_FIRST_WINDOWED_LAYER = 28
QWEN3_HEAD_DIM = 128
MINISTRAL3_HEAD_DIM = 128
ACTIVATIONS: dict[str, Activation] = {"silu": "silu_and_mul", "swish": "silu_and_mul"}
WEIGHTS = WeightMap(
    prefixes=("model.", ""),
    layer="layers.{layer}.",
    embedding="embed_tokens",
    attention_norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_out="self_attn.o_proj",
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    feed_forward_norm="post_attention_layernorm",
    feed_forward_in=("mlp.gate_proj", "mlp.up_proj"),
    feed_forward_out="mlp.down_proj",
    final_norm="norm",
    harmless=("rotary_emb.inv_freq",),
)


def llama(
    config: ConfigReader, *, activation: Activation | None = None, partial_rotary: float | None = None
) -> DecoderSpec:
    """Return the spec of a Llama. `activation`: read by a family of its own; `partial_rotary` as in `rope.py`."""
    num_heads, hidden_size = config.size("num_attention_heads"), config.size("hidden_size")
    has_head_dim = config.has("head_dim")
    head_dim = config.size("head_dim", limit=MAX_HEAD_DIM) if has_head_dim else config.divided("hidden_size", num_heads)
    max_position_embeddings = config.size("max_position_embeddings", limit=MAX_POSITIONS)
    has_bias = config.flag("attention_bias", False)
    layer = LayerSpec(
        mixer=Attention(
            num_heads=num_heads,
            num_kv_heads=config.size("num_key_value_heads", num_heads),
            head_dim=head_dim,
            has_qkv_bias=has_bias,
            has_attention_out_bias=has_bias,
        ),
        feed_forward=FeedForward(
            size=config.size("intermediate_size"),
            activation=config.choice("hidden_act", ACTIVATIONS, default="silu") if activation is None else activation,
            has_bias=config.flag("mlp_bias", False),
        ),
    )
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden_size,
        layers=(layer,) * config.size("num_hidden_layers", limit=MAX_LAYERS),
        max_position_embeddings=max_position_embeddings,
        norm="rms",
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rotary=rotary_from_config(config, head_dim, max_position_embeddings, partial=partial_rotary),
        is_head_tied=config.flag("tie_word_embeddings", False),
        weights=WEIGHTS,
    )


def mistral(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Mistral 7B: every layer has a window (Jiang et al. 2023)."""
    spec = _with_biases(llama(config), has_qkv_bias=False)
    return spec.with_windows((config.nullable_size("sliding_window", DEFAULT_WINDOW),) * spec.num_layers)


def ministral3(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Ministral 3: queries grow with their position (Mistral AI 2025)."""
    config = config.with_default("head_dim", MINISTRAL3_HEAD_DIM).with_default("rms_norm_eps", 1e-5)
    spec = _with_biases(llama(config), has_qkv_bias=False)
    rope = config.nested("rope_parameters", config.section("rope_parameters"))
    if rope.has("llama_4_scaling_beta"):
        beta, length = rope.number("llama_4_scaling_beta"), rope.size("original_max_position_embeddings")
        spec = spec.with_attention(position_scale=(beta, length))
    window = config.size("sliding_window") if config.has("sliding_window") else None
    return spec.with_windows((window,) * spec.num_layers)


def qwen2(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Qwen2: biases on query, key and value (Yang et al. 2024)."""
    spec = _with_biases(llama(config), has_qkv_bias=True)
    return spec.with_windows(_qwen_windows(config, spec.num_layers))


def qwen3(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Qwen3 (2025): norms on query and key, heads with a width of their own."""
    spec = llama(config.with_default("head_dim", QWEN3_HEAD_DIM))
    spec = spec.with_layers(_without_mlp_bias).with_attention(has_query_key_norm=True)
    return spec.with_windows(_qwen_windows(config, spec.num_layers))


def _with_biases(spec: DecoderSpec, *, has_qkv_bias: bool) -> DecoderSpec:
    """Return a spec without biases, but for those of query, key and value."""
    spec = spec.with_layers(_without_mlp_bias)
    return spec.with_attention(has_qkv_bias=has_qkv_bias, has_attention_out_bias=False)


def _without_mlp_bias(layer: LayerSpec) -> LayerSpec:
    assert isinstance(layer.feed_forward, FeedForward)
    return replace(layer, feed_forward=replace(layer.feed_forward, has_bias=False))


def _qwen_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """One window per layer: as `layer_types` says, or from layer `max_window_layers` on; none unless switched on."""
    is_windowed = config.flag("use_sliding_window", False)
    window = config.nullable_size("sliding_window", DEFAULT_WINDOW) if is_windowed else None
    kinds = {"sliding_attention": window, "full_attention": None}
    if layer_types := config.strings("layer_types", kinds):
        return tuple(kinds[layer_type] for layer_type in layer_types)
    first = config.size("max_window_layers", DEFAULT_FIRST_WINDOWED_LAYER, least=0)
    return tuple(window if layer >= first else None for layer in range(num_layers))


FAMILIES: dict[str, Callable[[ConfigReader], DecoderSpec]] = {
    "LlamaForCausalLM": llama,
    "Ministral3ForCausalLM": ministral3,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}
