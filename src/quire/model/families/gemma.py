"""Gemma 1 to 4, their text: norms with 1 + weight, GEGLU, scaled embeddings (Gemma Team 2024).

Gemma 2 adds norms on the outputs of sublayers, softcaps, and windows in every other layer; Gemma 3 norms on query and
key in place of softcaps, and windows in five of six layers, with rotary embeddings of their own. In Gemma 4 layers
without a window have heads of their own, the last layers may read the caches of earlier ones, and there may be
embeddings by layer, or experts beside each feed-forward; norms have plain weights.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from quire.model.config_reader import LAYER_TYPES, MAX_HEAD_DIM, ConfigReader
from quire.model.llama import WEIGHTS as LLAMA_WEIGHTS
from quire.model.llama import llama
from quire.model.rope import rotary_of_layer_type
from quire.model.spec import (
    MAX_EXPERTS,
    Activation,
    Attention,
    DecoderSpec,
    ExpertNames,
    Experts,
    FeedForward,
    LayerInput,
    StackedTensor,
    WeightMap,
)

HEAD_DIM = 256
DEFAULT_WINDOW = 4096
DEFAULT_SCALAR = 256  # default of query_pre_attn_scalar
SCORE_SOFTCAP, LOGIT_SOFTCAP = 50.0, 30.0  # Gemma 2, where config.json leaves them out; null means none
FULL_THETA, WINDOWED_THETA = 1_000_000.0, 10_000.0  # Gemma 3
WINDOWED_LAYERS = 5  # Gemma 3, before each layer without a window
ACTIVATIONS: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh_and_mul", "gelu_new": "gelu_tanh_and_mul"}
OLD_ACTIVATIONS = ACTIVATIONS | {"gelu": "gelu_tanh_and_mul"}  # the first name of Gemma 1's activation
GLOBAL_HEAD_DIM = 512  # Gemma 4, in layers without a window
GEMMA4_SIZES = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": HEAD_DIM, "max_position_embeddings": 131_072,
}  # fmt: skip
GEMMA4_WINDOW = 512
FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": FULL_THETA}
INNER: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
AROUND = replace(
    LLAMA_WEIGHTS,
    attention_output_norm="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
    feed_forward_output_norm="post_feedforward_layernorm",
)

_GATE, _UP, _DOWN = (f"experts.{{expert}}.{name}_proj" for name in ("gate", "up", "down"))
GEMMA4_WEIGHTS = replace(
    AROUND,
    layer_scale="layer_scalar",
    layer_table="embed_tokens_per_layer",
    layer_projection="per_layer_model_projection",
    layer_projection_norm="per_layer_projection_norm",
    layer_gate="per_layer_input_gate",
    layer_out="per_layer_projection",
    layer_output_norm="post_per_layer_input_norm",
    experts=ExpertNames(
        router="router.proj",
        expert_in=(_GATE, _UP),
        expert_out=_DOWN,
        stacked=(
            StackedTensor("experts.gate_up_proj", (f"{_GATE}.weight", f"{_UP}.weight")),
            StackedTensor("experts.down_proj", (f"{_DOWN}.weight",)),
        ),
    ),
    renamed={"router.scale": "router.scale.weight"},
)


def gemma(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Gemma 1."""
    key = "hidden_activation" if config.has("hidden_activation") else "hidden_act"
    return _gemma(config, config.choice(key, OLD_ACTIVATIONS, default="gelu_pytorch_tanh"))


def gemma2(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Gemma 2."""
    spec = _around(config, softcap=config.nullable_number("attn_logit_softcapping", SCORE_SOFTCAP))
    spec = replace(spec, logit_softcap=config.nullable_number("final_logit_softcapping", LOGIT_SOFTCAP))
    window = config.nullable_size("sliding_window", DEFAULT_WINDOW)
    return spec.with_windowed_layers(config.layer_types(spec.num_layers, windowed=1), window=window)


def gemma3_text(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Gemma 3 for text."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        config.reject(key, why="Gemma 3 has norms on queries and keys in place of softcaps")
    plain = config.replaced(rope_scaling=None, rope_parameters=None)
    spec = _around(plain).with_attention(has_query_key_norm=True)
    length, head_dim = config.size("max_position_embeddings"), spec.head_dim
    full = rotary_of_layer_type(config, "full_attention", config.number("rope_theta", FULL_THETA), head_dim, length)
    theta = config.number("rope_local_base_freq", WINDOWED_THETA)
    windowed = rotary_of_layer_type(config, "sliding_attention", theta, head_dim, length)
    window = config.nullable_size("sliding_window", DEFAULT_WINDOW)
    num_windowed = config.size("sliding_window_pattern", WINDOWED_LAYERS + 1) - 1
    types = config.layer_types(spec.num_layers, windowed=num_windowed)
    full = replace(full, max_positions=length)  # the config states the scaled length
    spec = replace(spec, rotary=full, max_position_embeddings=length)
    return spec.with_windowed_layers(types, window=window, rotary=windowed)


def gemma4_text(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Gemma 4 for text: heads by layer, caches and embeddings of layers, experts."""
    config.reject("use_bidirectional_attention", "vision", why="attention is causal")
    config.reject("mlp_bias", False, why="its feed-forwards have no biases")
    for key, default in {**GEMMA4_SIZES, "tie_word_embeddings": True}.items():
        config = config.with_default(key, default)
    activation = config.choice("hidden_activation", ACTIVATIONS, default="gelu_pytorch_tanh")
    spec = llama(config.replaced(rope_scaling=None, rope_parameters=None), activation=activation)
    num_layers, types = spec.num_layers, list(config.layer_types(spec.num_layers, windowed=WINDOWED_LAYERS))
    types[-1] = LAYER_TYPES[1]  # whatever the config says, as in transformers
    layers, num_shared = list(spec.layers), config.size("num_kv_shared_layers", 0, least=0, limit=num_layers - 1)
    own = [_own_attention(config, spec, index, kind) for index, kind in enumerate(types)]
    has_wide = config.flag("use_double_wide_mlp", False)
    has_experts = config.flag("enable_moe_block", False)
    for index, attention in enumerate(own):
        feed_forward = layers[index].feed_forward
        assert isinstance(feed_forward, FeedForward)
        if index >= num_layers - num_shared:
            source = _shared_layer(config, types, num_layers - num_shared, index)
            attention = replace(attention, cache_layer=source)  # noqa: PLW2901
            if (attention.num_kv_heads, attention.head_dim) != (own[source].num_kv_heads, own[source].head_dim):
                raise config.error(
                    f"num_kv_shared_layers = {num_shared}: layer {index} has other heads than layer {source}, of which "
                    "it reads the keys and values"
                )
            if has_wide:
                feed_forward = replace(feed_forward, size=2 * feed_forward.size)
        layers[index] = replace(
            layers[index], mixer=attention, feed_forward=feed_forward, norm_position="around", has_scale=True,
            experts_beside=_experts_beside(config, activation) if has_experts else None,
        )  # fmt: skip
    size = config.size("hidden_size_per_layer_input", HEAD_DIM, least=0)
    layer_input = None
    if size:
        num_rows = config.size("vocab_size_per_layer_input", spec.vocab_size)
        if num_rows < spec.vocab_size:
            raise config.error(
                f"vocab_size_per_layer_input {num_rows} must be at least vocab_size {spec.vocab_size}: a row for each"
            )
        inner = config.choice("hidden_activation", INNER, default="gelu_pytorch_tanh")
        layer_input = LayerInput(size, num_rows, inner)
    return replace(
        spec, layers=tuple(layers), norm="rms_float", weights=_gemma4_weights(num_layers, num_shared),
        rotary=own[-1].rotary, layer_input=layer_input, embedding_multiplier=math.sqrt(spec.hidden_size),
        is_embedding_multiplier_rounded=True,
        logit_softcap=config.number("final_logit_softcapping") if config.has("final_logit_softcapping") else 0.0,
    )  # fmt: skip


def _own_attention(config: ConfigReader, spec: DecoderSpec, index: int, kind: str) -> Attention:
    """Return the attention of a Gemma 4's layer, as if it had a cache of its own."""
    attention, is_full = spec.layers[index].mixer, kind == LAYER_TYPES[1]
    assert isinstance(attention, Attention)
    is_shared, length = config.flag("attention_k_eq_v", False), spec.max_position_embeddings
    head_dim, num_kv_heads = attention.head_dim, attention.num_kv_heads
    if config.has("per_layer_config"):  # as transformers 5 writes it
        by_layer = config.sections("per_layer_config")
        if str(index) in by_layer:
            sizes = by_layer[str(index)]
            sizes.allow_only("head_dim", "num_key_value_heads")
            head_dim = sizes.size("head_dim", head_dim, limit=MAX_HEAD_DIM)
            num_kv_heads = sizes.size("num_key_value_heads", num_kv_heads)
    elif is_full:
        head_dim = config.size("global_head_dim", GLOBAL_HEAD_DIM, limit=MAX_HEAD_DIM)
        num_kv_heads = config.size("num_global_key_value_heads", num_kv_heads) if is_shared else num_kv_heads
    if not config.section("rope_parameters"):
        config = config.replaced(rope_parameters={LAYER_TYPES[1]: FULL_ROPE})
    theta = FULL_THETA if is_full else WINDOWED_THETA
    rotary = rotary_of_layer_type(config, kind, theta, head_dim, length)
    return replace(
        attention, num_kv_heads=num_kv_heads, head_dim=head_dim, attention_scale=1.0, has_query_key_norm=True,
        has_value_norm=True, are_values_keys=is_shared and is_full, rotary=replace(rotary, max_positions=length),
        window=None if is_full else config.size("sliding_window", GEMMA4_WINDOW),
    )  # fmt: skip


def _shared_layer(config: ConfigReader, types: Sequence[str], num_own: int, index: int) -> int:
    """Return the layer with the cache that a layer reads: the last one of its type among the first `num_own`."""
    found = [other for other in range(num_own) if types[other] == types[index]]
    if not found:
        raise config.error(
            f"num_kv_shared_layers = {len(types) - num_own}: layer {index} is of the type {types[index]!r}, and none "
            f"of the first {num_own} layers is"
        )
    return found[-1]


def _experts_beside(config: ConfigReader, activation: Activation) -> Experts:
    num_experts = config.size("num_experts", limit=MAX_EXPERTS)
    return Experts(
        num_experts, config.size("top_k_experts", limit=num_experts),
        FeedForward(config.size("moe_intermediate_size"), activation), is_normalized=True, has_scales=True,
    )  # fmt: skip


def _gemma4_weights(num_layers: int, num_shared: int) -> WeightMap:
    """Return the names, without those of keys and values that checkpoints have of layers that read another cache."""
    modules = ("k_proj", "v_proj", "k_norm", "v_norm")
    shared = range(num_layers - num_shared, num_layers)
    skipped = tuple(f"layers.{index}.self_attn.{module}." for index in shared for module in modules)
    return replace(GEMMA4_WEIGHTS, skipped=skipped)


def _gemma(config: ConfigReader, activation: Activation) -> DecoderSpec:
    config.reject("use_bidirectional_attention", False, why="attention is causal")
    config = config.with_default("head_dim", HEAD_DIM).with_default("tie_word_embeddings", True)
    spec = llama(config, activation=activation)
    multiplier = math.sqrt(spec.hidden_size)
    return replace(
        spec, norm="rms_offset", embedding_multiplier=multiplier, is_embedding_multiplier_rounded=True
    )


def _around(config: ConfigReader, softcap: float = 0.0) -> DecoderSpec:
    spec = _gemma(config, config.choice("hidden_activation", ACTIVATIONS, default="gelu_pytorch_tanh"))
    scale = config.number("query_pre_attn_scalar", DEFAULT_SCALAR) ** -0.5
    spec = replace(spec, weights=AROUND).with_attention(attention_scale=scale, softcap=softcap)
    return spec.with_layers(partial(replace, norm_position="around"))
