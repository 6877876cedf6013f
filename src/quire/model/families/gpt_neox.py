"""GPT-NeoX and Pythia: parallel sublayers with a norm each, partial rotary embeddings, biases (Black et al. 2022)."""

from quire.model.config_reader import MAX_LAYERS, MAX_POSITIONS, ConfigReader
from quire.model.rope import DEFAULT_THETA, rotary_from_config
from quire.model.spec import ACTIVATIONS, Attention, DecoderSpec, FeedForward, LayerSpec, WeightMap

PARTIAL_ROTARY = 0.25
WEIGHTS = WeightMap(
    prefixes=("gpt_neox.", ""),
    layer="layers.{layer}.",
    embedding="embed_in",
    attention_norm="input_layernorm",
    qkv=("attention.query_key_value",),
    is_qkv_grouped=True,
    attention_out="attention.dense",
    feed_forward_norm="post_attention_layernorm",
    feed_forward_in=("mlp.dense_h_to_4h",),
    feed_forward_out="mlp.dense_4h_to_h",
    final_norm="final_layer_norm",
    head="embed_out",
    other_heads=("lm_head",),
    harmless=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)


def gpt_neox(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a GPT-NeoX or Pythia."""
    config = config.with_default("rope_theta", config.number("rotary_emb_base", DEFAULT_THETA))
    config = config.with_default("partial_rotary_factor", config.number("rotary_pct", PARTIAL_ROTARY))
    num_heads, has_bias = config.size("num_attention_heads"), config.flag("attention_bias", True)
    head_dim = config.divided("hidden_size", num_heads)
    length = config.size("max_position_embeddings", limit=MAX_POSITIONS)
    layer = LayerSpec(
        mixer=Attention(num_heads, num_heads, head_dim, has_qkv_bias=has_bias, has_attention_out_bias=has_bias),
        feed_forward=FeedForward(
            size=config.size("intermediate_size"),
            activation=config.choice("hidden_act", ACTIVATIONS, default="gelu"),
            has_bias=True,
        ),
        is_parallel=config.flag("use_parallel_residual", True),
    )
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        layers=(layer,) * config.size("num_hidden_layers", limit=MAX_LAYERS),
        max_position_embeddings=length,
        norm="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        rotary=rotary_from_config(config, head_dim, length, partial=PARTIAL_ROTARY),
        is_head_tied=config.flag("tie_word_embeddings", False),
        weights=WEIGHTS,
    )
