"""Encoders: models that give vectors of texts, and no next tokens.

RoBERTa counts positions from the number of its padding token on (Liu et al. 2019); XLM-RoBERTa is the same, of many
languages (Conneau et al. 2020). DistilBERT has no types of tokens (Sanh et al. 2019).

Warner et al. 2024. Norms stand before sublayers; the first layer reads the normalized embeddings as they are.
"""

from dataclasses import replace

from quire.model.config_reader import MAX_LAYERS, MAX_POSITIONS, ConfigReader
from quire.model.rope import rotary_of_layer_type
from quire.model.spec import (
    ACTIVATIONS,
    Activation,
    Attention,
    Classifier,
    DecoderSpec,
    FeedForward,
    LayerSpec,
    PoolingOfTexts,
    WeightMap,
)

DEFAULT_LABELS = 2
MAX_LABELS = 2**16
NORM_EPS = 1e-12
PADDING = 1  # RoBERTa, where config.json leaves it out
BERT_WEIGHTS = WeightMap(
    prefixes=("bert.", ""),
    layer="encoder.layer.{layer}.",
    embedding="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    token_types="embeddings.token_type_embeddings",  # noqa: S106 (no password)
    embedding_norm="embeddings.LayerNorm",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    attention_out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    feed_forward_in=("intermediate.dense",),
    feed_forward_out="output.dense",
    feed_forward_norm="output.LayerNorm",
    final_norm="",
    classifier="bert.pooler.dense",
    head="classifier",
    skipped=("pooler.", "cls.", "lm_head."),
    harmless=("embeddings.position_ids",),
)
ROBERTA_WEIGHTS = replace(
    BERT_WEIGHTS, prefixes=("roberta.", ""), classifier="classifier.dense", head="classifier.out_proj"
)
DISTILBERT_WEIGHTS = replace(
    BERT_WEIGHTS,
    prefixes=("distilbert.", ""),
    layer="transformer.layer.{layer}.",
    token_types=None,
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    attention_out="attention.out_lin",
    attention_norm="sa_layer_norm",
    feed_forward_in=("ffn.lin1",),
    feed_forward_out="ffn.lin2",
    feed_forward_norm="output_layer_norm",
    classifier="pre_classifier",
    skipped=("vocab_",),
)


def bert(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a BERT, as in E5, BGE, GTE and MiniLM."""
    for key in ("is_decoder", "add_cross_attention"):
        config.reject(key, False, why="it is served as an encoder")
    config.choice("position_embedding_type", {"absolute": None}, default="absolute")
    num_heads, hidden_size = config.size("num_attention_heads"), config.size("hidden_size")
    layer = LayerSpec(
        mixer=Attention(
            num_heads, num_heads, config.divided("hidden_size", num_heads), has_qkv_bias=True,
            has_attention_out_bias=True, is_causal=False,
        ),
        feed_forward=FeedForward(
            size=config.size("intermediate_size"),
            activation=config.choice("hidden_act", ACTIVATIONS, default="gelu"),
            has_bias=True,
        ),
        norm_position="post",
    )  # fmt: skip
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden_size,
        layers=(layer,) * config.size("num_hidden_layers", limit=MAX_LAYERS),
        max_position_embeddings=config.size("max_position_embeddings"),
        norm="layer",
        norm_eps=config.number("layer_norm_eps", NORM_EPS),
        has_embedding_norm=True,
        has_final_norm=False,
        has_head_bias=True,
        num_token_types=config.size("type_vocab_size", 2),
        classifier=Classifier(num_labels(config), "tanh"),
        weights=BERT_WEIGHTS,
    )


def roberta(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a RoBERTa."""
    spec, offset = bert(config), config.size("pad_token_id", PADDING, least=0) + 1
    length = spec.max_position_embeddings - offset
    if length < 1:
        raise config.error(f"max_position_embeddings must be above pad_token_id + 1 = {offset}, got {length + offset}")
    return replace(spec, weights=ROBERTA_WEIGHTS, max_position_embeddings=length, position_offset=offset)


def xlm_roberta(config: ConfigReader) -> DecoderSpec:
    """Return the spec of an XLM-RoBERTa, as in multilingual E5 and BGE M3 and their rerankers."""
    return roberta(config)


def distilbert(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a DistilBERT."""
    names = {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
    values = {name: config.size(key) for name, key in (names | {"intermediate_size": "hidden_dim"}).items()}
    activation = config.choice("activation", {name: name for name in ACTIVATIONS}, default="gelu")
    spec = bert(config.replaced(**values, hidden_act=activation, layer_norm_eps=NORM_EPS))
    classifier = Classifier(num_labels(config), "relu")
    return replace(spec, weights=DISTILBERT_WEIGHTS, num_token_types=0, classifier=classifier)


def num_labels(config: ConfigReader) -> int:
    """Return the labels of a classifier."""
    names = config.section("id2label")
    return len(names) if names else config.size("num_labels", DEFAULT_LABELS, limit=MAX_LABELS)


FULL_THETA, WINDOWED_THETA = 160_000.0, 10_000.0
FULL_EVERY, LOCAL_ATTENTION = 3, 128  # a layer without a window comes first; a window counts tokens on both sides
GATES: dict[str, Activation] = {
    "gelu": "gelu_and_mul", "gelu_pytorch_tanh": "gelu_tanh_and_mul", "silu": "silu_and_mul"
}  # fmt: skip
POOLINGS: dict[str, PoolingOfTexts] = {"cls": "cls", "mean": "mean"}
MODERNBERT_WEIGHTS = WeightMap(
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
    has_bias = config.flag("attention_bias", False)
    layer = LayerSpec(
        mixer=Attention(
            num_heads, num_heads, head_dim, has_qkv_bias=has_bias, has_attention_out_bias=has_bias, is_causal=False
        ),
        feed_forward=FeedForward(
            size=config.size("intermediate_size"),
            activation=config.choice("hidden_activation", GATES, default="gelu"),
            has_bias=config.flag("mlp_bias", False),
        ),
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
        weights=MODERNBERT_WEIGHTS,
    )
    return spec.with_windowed_layers(
        config.layer_types(num_layers, default=default),
        window=config.size("local_attention", LOCAL_ATTENTION) // 2 + 1,
        rotary=rotary_of_layer_type(config, "sliding_attention", windowed_theta, head_dim, length),
    )
