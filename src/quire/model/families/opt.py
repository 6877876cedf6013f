"""OPT, the models of the PagedAttention paper: GPT-2's parts, unfused (Zhang et al. 2022).

The 350m model alone normalizes after each sublayer and has embeddings narrower than its hidden states.
"""

from quire.model.config_reader import MAX_LAYERS, ConfigReader
from quire.model.spec import Activation, Attention, DecoderSpec, FeedForward, LayerSpec, WeightMap

ACTIVATIONS: dict[str, Activation] = {"relu": "relu", "gelu": "gelu"}
POSITION_OFFSET = 2  # rows of the position table that padding took in the code it was trained with
NORM_EPS = 1e-5      # config.json does not have it
WEIGHTS = WeightMap(
    prefixes=("model.decoder.", "decoder."),
    layer="layers.{layer}.",
    embedding="embed_tokens",
    positions="embed_positions",
    project_in="project_in",
    project_out="project_out",
    attention_norm="self_attn_layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_out="self_attn.out_proj",
    feed_forward_norm="final_layer_norm",
    feed_forward_in=("fc1",),
    feed_forward_out="fc2",
    final_norm="final_layer_norm",
)


def opt(config: ConfigReader) -> DecoderSpec:
    """Return the spec of an OPT."""
    has_norm_weights = config.flag("layer_norm_elementwise_affine", True)
    num_heads, hidden_size = config.size("num_attention_heads"), config.size("hidden_size")
    is_pre_norm = config.flag("do_layer_norm_before", True)
    has_bias, head_dim = config.flag("enable_bias", True), config.divided("hidden_size", num_heads)
    layer = LayerSpec(
        mixer=Attention(num_heads, num_heads, head_dim, has_qkv_bias=has_bias, has_attention_out_bias=has_bias),
        feed_forward=FeedForward(
            size=config.size("ffn_dim"),
            activation=config.choice("activation_function", ACTIVATIONS, default="relu"),
            has_bias=has_bias,
        ),
        norm_position="pre" if is_pre_norm else "post",
    )
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden_size,
        layers=(layer,) * config.size("num_hidden_layers", limit=MAX_LAYERS),
        max_position_embeddings=config.size("max_position_embeddings"),
        position_offset=POSITION_OFFSET,
        embedding_size=config.size("word_embed_proj_dim", hidden_size),
        norm="layer",
        norm_eps=NORM_EPS,
        norm_has_weight=has_norm_weights,
        norm_has_bias=has_norm_weights,
        has_final_norm=is_pre_norm and not config.flag("_remove_final_layer_norm", False),
        is_head_tied=config.flag("tie_word_embeddings", True),
        weights=WEIGHTS,
    )
