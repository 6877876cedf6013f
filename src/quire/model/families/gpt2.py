"""GPT-2: LayerNorm before each sublayer, learned positions, biases everywhere (Radford et al. 2019)."""


from quire.model.config_reader import MAX_LAYERS, ConfigReader
from quire.model.spec import ACTIVATIONS, Attention, DecoderSpec, FeedForward, LayerSpec, WeightMap

WEIGHTS = WeightMap(
    prefixes=("transformer.", ""),
    layer="h.{layer}.",
    embedding="wte",
    positions="wpe",
    attention_norm="ln_1",
    qkv=("attn.c_attn",),
    attention_out="attn.c_proj",
    feed_forward_norm="ln_2",
    feed_forward_in=("mlp.c_fc",),
    feed_forward_out="mlp.c_proj",
    final_norm="ln_f",
    is_transposed=True,
    harmless=(".attn.bias", ".attn.masked_bias"),
)


def gpt2(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a GPT-2."""
    config.reject("add_cross_attention", False, why="there is no encoder to attend to")
    num_layers, num_heads = config.size("n_layer", limit=MAX_LAYERS), config.size("n_head")
    head_dim, hidden_size = config.divided("n_embd", num_heads), config.size("n_embd")
    scale = head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
    layer = LayerSpec(
        mixer=Attention(num_heads, num_heads, head_dim, has_qkv_bias=True, has_attention_out_bias=True),
        feed_forward=FeedForward(
            size=config.size("n_inner", 4 * hidden_size),
            activation=config.choice("activation_function", ACTIVATIONS, default="gelu_new"),
            has_bias=True,
        ),
    )
    scales = (scale / (index + 1 if by_layer else 1) for index in range(num_layers))
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(layer.with_attention(attention_scale=each) for each in scales),
        max_position_embeddings=config.size("n_positions"),
        norm="layer",
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        is_head_tied=config.flag("tie_word_embeddings", True),
        weights=WEIGHTS,
    )
