"""Falcon: rotary positions, few key-value heads, in most models parallel sublayers (Almazrouei et al. 2023).

The first models have one key-value head, or one for each query head; those of the new architecture have groups, and
a norm for each sublayer or one for both.
"""

from dataclasses import replace

from quire.model.config_reader import MAX_LAYERS, MAX_POSITIONS, ConfigReader
from quire.model.rope import rotary_from_config
from quire.model.spec import ACTIVATIONS, Attention, DecoderSpec, FeedForward, LayerSpec, WeightMap

DEFAULT_POSITIONS = 2048
WEIGHTS = WeightMap(
    prefixes=("transformer.", ""),
    layer="h.{layer}.",
    embedding="word_embeddings",
    attention_norm="input_layernorm",
    qkv=("self_attention.query_key_value",),
    attention_out="self_attention.dense",
    feed_forward_norm="post_attention_layernorm",
    feed_forward_in=("mlp.dense_h_to_4h",),
    feed_forward_out="mlp.dense_4h_to_h",
    final_norm="ln_f",
    harmless=(".rotary_emb.inv_freq",),
)


def falcon(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Falcon."""
    config.reject("alibi", False, why="biases of attention scores by distance are not computed")
    num_heads, is_new = config.size("num_attention_heads"), config.flag("new_decoder_architecture", False)
    is_parallel = config.flag("parallel_attn", True)
    if is_new and not is_parallel:
        raise config.error("parallel_attn must be true with new_decoder_architecture, got False")
    is_multi_query = config.flag("multi_query", True) and not is_new
    num_norms = config.size("num_ln_in_parallel_attn", 2 if is_new else 1, limit=2 if is_new else 1)
    num_kv_heads = config.size("num_kv_heads", num_heads)
    hidden_size, has_bias = config.size("hidden_size"), config.flag("bias", False)
    length = config.size("max_position_embeddings", DEFAULT_POSITIONS, limit=MAX_POSITIONS)
    attention = Attention(
        num_heads=num_heads,
        num_kv_heads=1 if is_multi_query else num_kv_heads if is_new else num_heads,
        head_dim=config.divided("hidden_size", num_heads),
        has_qkv_bias=has_bias,
        has_attention_out_bias=has_bias,
    )
    layer = LayerSpec(
        mixer=attention,
        feed_forward=FeedForward(
            size=config.size("ffn_hidden_size", 4 * hidden_size),
            activation=config.choice("activation", ACTIVATIONS, default="gelu"),
            has_bias=has_bias,
        ),
        is_parallel=is_parallel,
    )
    weights = replace(WEIGHTS, is_qkv_grouped=not is_multi_query)
    if num_norms == 2:
        weights = replace(weights, attention_norm="ln_attn", feed_forward_norm="ln_mlp")
    elif is_parallel:
        weights = replace(weights, feed_forward_norm=None)
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden_size,
        layers=(layer,) * config.size("num_hidden_layers", limit=MAX_LAYERS),
        max_position_embeddings=length,
        norm="layer",
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        rotary=rotary_from_config(config, attention.head_dim, length),
        is_head_tied=config.flag("tie_word_embeddings", True),
        weights=weights,
    )
