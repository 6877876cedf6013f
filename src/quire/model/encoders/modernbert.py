"""ModernBERT: an encoder with rotary positions, gated feed-forwards and windows in two of three layers.

Warner et al. 2024. Norms stand before sublayers; the first layer reads the normalized embeddings as they are.
"""

from dataclasses import replace

from quire.model.config_reader import MAX_LAYERS, MAX_POSITIONS, ConfigReader
from quire.model.encoders.bert import num_labels
from quire.model.rope import rotary_of_layer_type
from quire.model.spec import (
    ACTIVATIONS,
    Activation,
    Classifier,
    DecoderSpec,
    FeedForward,
    LayerSpec,
    PoolingOfTexts,
    WeightMap,
)

FULL_THETA, WINDOWED_THETA = 160_000.0, 10_000.0
FULL_EVERY, LOCAL_ATTENTION = 3, 128  # a layer without a window comes first; a window counts tokens on both sides
GATES: dict[str, Activation] = {
    "gelu": "gelu_and_mul", "gelu_pytorch_tanh": "gelu_tanh_and_mul", "silu": "silu_and_mul"
}  # fmt: skip
POOLINGS: dict[str, PoolingOfTexts] = {"cls": "cls", "mean": "mean"}
WEIGHTS = WeightMap(
    prefixes=("model.", ""),
    layer="layers.{layer}.",
    embedding="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    attention_norm="attn_norm",
    qkv=("attn.Wqkv",),
    attention_out="attn.Wo",
    feed_forward_norm="mlp_norm",
    feed_forward_in=("mlp.Wi",),
    feed_forward_out="mlp.Wo",
    final_norm="final_norm",
    classifier="head.dense",
    classifier_norm="head.norm",
    head="classifier",
    skipped=("head.", "decoder."),
)


def modernbert(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a ModernBERT, as in GTE ModernBERT and its reranker."""
    config.reject("rope_scaling", why="rotary embeddings of each type of layers are those of rope_parameters")
    num_heads, num_layers = config.size("num_attention_heads"), config.size("num_hidden_layers", limit=MAX_LAYERS)
    head_dim = config.divided("hidden_size", num_heads)
    length = config.size("max_position_embeddings", limit=MAX_POSITIONS)
    full_theta, windowed_theta = (
        config.number(key, default)
        for key, default in (("global_rope_theta", FULL_THETA), ("local_rope_theta", WINDOWED_THETA))
    )
    layer = LayerSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        feed_forward=FeedForward(
            size=config.size("intermediate_size"),
            activation=config.choice("hidden_activation", GATES, default="gelu"),
            has_bias=config.flag("mlp_bias", False),
        ),
        has_qkv_bias=config.flag("attention_bias", False),
        has_attention_out_bias=config.flag("attention_bias", False),
        is_causal=False,
    )
    full_every = config.size("global_attn_every_n_layers", FULL_EVERY)
    default = ["sliding_attention" if index % full_every else "full_attention" for index in range(num_layers)]
    spec = DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        layers=(replace(layer, has_attention_norm=False), *(layer,) * (num_layers - 1)),
        max_position_embeddings=length,
        norm="layer",
        norm_eps=config.number("norm_eps", 1e-5),
        norm_has_bias=config.flag("norm_bias", False),
        rotary=rotary_of_layer_type(config, "full_attention", full_theta, head_dim, length),
        has_embedding_norm=True,
        has_head_bias=True,
        classifier=Classifier(
            num_labels(config),
            config.choice("classifier_activation", ACTIVATIONS, default="gelu"),
            has_bias=config.flag("classifier_bias", False),
            pooling=config.choice("classifier_pooling", POOLINGS, default="cls"),
        ),
        weights=WEIGHTS,
    )
    return spec.with_windowed_layers(
        config.layer_types(num_layers, default=default),
        window=config.size("local_attention", LOCAL_ATTENTION) // 2 + 1,
        rotary=rotary_of_layer_type(config, "sliding_attention", windowed_theta, head_dim, length),
    )
