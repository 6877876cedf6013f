"""Hybrids of Mamba-2 (Dao and Gu 2024) and attention: Bamba, Falcon-H1, Granite 4 H and Nemotron-H.

Time steps are not clamped, as in vLLM. transformers' Nemotron-H raises those of a prompt, but not those of an answer,
to `time_step_min`, a number of initialization.
"""

import math
from dataclasses import replace
from functools import partial

from quire.kernels.delta_net import MAX_TAPS
from quire.model.config_reader import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_NUMBER,
    MAX_POSITIONS,
    MIN_NUMBER,
    ConfigReader,
)
from quire.model.families.llama_variants import granite
from quire.model.llama import WEIGHTS as LLAMA_WEIGHTS
from quire.model.llama import llama
from quire.model.spec import (
    MAX_EXPERTS,
    Activation,
    Attention,
    DecoderSpec,
    ExpertNames,
    Experts,
    FeedForward,
    LayerSpec,
    Mamba,
    StackedTensor,
    WeightMap,
    with_mtp,
)

MAX_HEADS = 2**16
INFINITIES = math.inf, {"__float__": "Infinity"}  # as older and newer transformers write it
LAYER_TYPES = {
    "mamba": True, "linear_attention": True, "attention": False, "full_attention": False
}  # older and newer names, and whether the layer is a Mamba-2
WEIGHTS = replace(
    LLAMA_WEIGHTS,
    mamba_in="mamba.in_proj",
    mamba_conv="mamba.conv1d",
    mamba_rate="mamba.A_log",
    mamba_rate_bias="mamba.dt_bias",
    mamba_skip="mamba.D",
    mamba_norm="mamba.norm",
    mamba_out="mamba.out_proj",
)
_GATE, _UP, _DOWN = (f"block_sparse_moe.experts.{{expert}}.{name}" for name in ("gate", "up", "down"))
GRANITE_WEIGHTS = replace(
    WEIGHTS,
    feed_forward_in=("shared_mlp.input_linear",),
    feed_forward_out="shared_mlp.output_linear",
    experts=ExpertNames(
        router="block_sparse_moe.router.layer",
        expert_in=(_GATE, _UP),
        expert_out=_DOWN,
        shared_in=("shared_mlp.input_linear",),
        shared_out="shared_mlp.output_linear",
        stacked=(
            StackedTensor("block_sparse_moe.input_linear.weight", (f"{_GATE}.weight", f"{_UP}.weight")),
            StackedTensor("block_sparse_moe.output_linear.weight", (f"{_DOWN}.weight",)),
            StackedTensor("block_sparse_moe.experts.gate_up_proj", (f"{_GATE}.weight", f"{_UP}.weight")),
            StackedTensor("block_sparse_moe.experts.down_proj", (f"{_DOWN}.weight",)),
        ),
        stacked_names={"block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight"},
    ),
)


def granitemoehybrid(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Granite 4, H or not: an expert that all tokens use, and others beside it (IBM 2025)."""
    config.reject("mlp_bias", False, why="its feed-forwards have no biases")
    spec = granite(config.with_default("intermediate_size", 11_008))
    if not config.choice("position_embedding_type", {"nope": False, "rope": True}, "nope"):
        spec = replace(spec, rotary=None)
    dense = spec.layers[0].feed_forward
    assert isinstance(dense, FeedForward)
    shared = replace(dense, size=config.size("shared_intermediate_size", 1024))
    num_experts = config.size("num_local_experts", 8, least=0, limit=MAX_EXPERTS)
    feed_forward: FeedForward | Experts = shared
    if num_experts:
        num_active = config.size("num_experts_per_tok", 2, limit=num_experts)
        feed_forward = Experts(
            num_experts, num_active, dense, is_normalized=True, shared=shared, is_shared_scored=False
        )
    spec = replace(spec, weights=GRANITE_WEIGHTS).with_layers(partial(replace, feed_forward=feed_forward))
    key = "layers_block_type" if config.has("layers_block_type") else "layer_types"
    is_mamba = [LAYER_TYPES[kind] for kind in config.strings(key, LAYER_TYPES)] or [True] * spec.num_layers
    if len(is_mamba) != spec.num_layers:
        raise config.error(f"{key} has {len(is_mamba)} entries for {spec.num_layers} layers")
    return _with_mambas(spec, _mamba(config) if any(is_mamba) else None, is_mamba)


BAMBA_WEIGHTS = replace(
    WEIGHTS,
    feed_forward_norm="pre_ff_layernorm",
    feed_forward_in=("feed_forward.gate_proj", "feed_forward.up_proj"),
    feed_forward_out="feed_forward.down_proj",
    final_norm="final_layernorm",
)
BAMBA_SIZES = {"max_position_embeddings": 262_144, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
PARTIAL_ROTARY = 0.5


def bamba(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Bamba (IBM, Princeton, CMU and UIUC 2024): half of a head's dimensions are rotated."""
    for key, default in BAMBA_SIZES.items():
        config = config.with_default(key, default)
    spec = replace(llama(config, partial_rotary=PARTIAL_ROTARY), weights=BAMBA_WEIGHTS)
    head_dim = spec.head_dim
    config.reject("attn_rotary_emb", head_dim // 2, why=f"half of a head's {head_dim} dimensions are rotated")
    attending = config.indices("attn_layer_indices", spec.num_layers)
    return _with_mambas(spec, _mamba(config), [index not in attending for index in range(spec.num_layers)])


FALCON_SIZES = {"max_position_embeddings": 8192, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}


def falcon_h1(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Falcon-H1 (TII 2025): attention and a Mamba-2 side by side, and factors on most inputs."""
    for key, default in FALCON_SIZES.items():
        config = config.with_default(key, default)

    def number(key: str) -> float:
        return config.number(key, 1.0)

    def numbers(key: str, count: int) -> tuple[float, ...]:
        return config.numbers(key, count) if config.has(key) else (1.0,) * count

    before_attention, before_mamba, (gate, down) = (
        number("attention_in_multiplier"), number("ssm_in_multiplier"), numbers("mlp_multipliers", 2)
    )
    for key, factor in (("attention_bias", before_attention), ("mamba_proj_bias", before_mamba), ("mlp_bias", gate)):
        if factor != 1:
            config.reject(key, False, why=f"the layer's input has the factor {factor}, and a bias has not")
    has_bias = config.flag("mamba_proj_bias", False)
    config = config.with_default("projectors_bias", False)
    config.reject("projectors_bias", has_bias, why=f"mamba_proj_bias = {has_bias}, and both projections are alike")
    spec = replace(llama(config), weights=BAMBA_WEIGHTS)
    mamba = replace(
        _mamba(config, config.nullable_size("mamba_d_ssm", 1024)),
        has_norm=config.flag("mamba_rms_norm", False),
        is_norm_first=config.flag("mamba_norm_before_gate", True),
        multipliers=tuple(before_mamba * factor for factor in numbers("ssm_multipliers", 5)),
    )
    # A factor on an input is one on queries, keys and values: on scores, and on results.
    scale = spec.attentions[0].scale * number("key_multiplier") * before_attention**2
    spec = spec.with_attention(attention_scale=scale).with_layers(partial(
        replace,
        beside=mamba,
        mixer_multipliers=(number("attention_out_multiplier") * before_attention, number("ssm_out_multiplier")),
        feed_forward_multipliers=(gate, down / gate),  # a factor on gates, as one on gates and ups
    ))  # fmt: skip
    first = spec.layers[0]
    for factor in (scale, *mamba.multipliers, *first.mixer_multipliers, *first.feed_forward_multipliers):
        if not MIN_NUMBER <= factor <= MAX_NUMBER:
            raise config.error(f"its multipliers make a factor of {factor:g}, not from {MIN_NUMBER} to {MAX_NUMBER}")
    embedding, logits = number("embedding_multiplier"), number("lm_head_multiplier")
    return replace(spec, embedding_multiplier=embedding, logit_multiplier=logits)


_UP_OF_EXPERT, _DOWN_OF_EXPERT = (f"mixer.experts.{{expert}}.{name}_proj" for name in ("up", "down"))
NEMOTRON_EXPERTS = ExpertNames(
    router="mixer.gate",
    router_bias="mixer.gate.e_score_correction_bias",
    expert_in=(_UP_OF_EXPERT,),
    expert_out=_DOWN_OF_EXPERT,
    shared_in=("mixer.shared_experts.up_proj",),
    shared_out="mixer.shared_experts.down_proj",
    latent_in="mixer.fc1_latent_proj",
    latent_out="mixer.fc2_latent_proj",
    stacked=(
        StackedTensor("mixer.experts.up_proj", (f"{_UP_OF_EXPERT}.weight",)),
        StackedTensor("mixer.experts.down_proj", (f"{_DOWN_OF_EXPERT}.weight",)),
    ),
)
NEMOTRON_WEIGHTS = WeightMap(
    prefixes=("backbone.", "model.", ""),
    layer="layers.{layer}.",
    embedding="embeddings",
    attention_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    attention_out="mixer.o_proj",
    mamba_in="mixer.in_proj",
    mamba_conv="mixer.conv1d",
    mamba_rate="mixer.A_log",
    mamba_rate_bias="mixer.dt_bias",
    mamba_skip="mixer.D",
    mamba_norm="mixer.norm",
    mamba_out="mixer.out_proj",
    feed_forward_norm="norm",
    feed_forward_in=("mixer.up_proj",),
    feed_forward_out="mixer.down_proj",
    final_norm="norm_f",
    experts=NEMOTRON_EXPERTS,
    skipped=("mtp.",),
)
NEMOTRON_LAYERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # pattern: list
NEMOTRON_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}
NEMOTRON_KINDS = (*NEMOTRON_LAYERS.values(), *NEMOTRON_OLDER)
HEAD_KINDS = ["full_attention", "moe"]
NEMOTRON_ACTIVATIONS: dict[str, Activation] = {"relu2": "relu2"}


def nemotron_h(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Nemotron-H, Nemotron 3 Nano or Super: each layer a mixer or a feed-forward (NVIDIA 2025)."""
    config.reject("attention_bias", False, why="projections of attention have no biases")
    config.reject("residual_in_fp32", False, why="hidden states are of the model's dtype")
    config.reject("sliding_window", why="its attention has no window")
    kinds = _nemotron_layers(config)
    num_heads, hidden_size = config.size("num_attention_heads", 32), config.size("hidden_size", 4096)
    head_key = "attention_head_dim" if config.has("attention_head_dim") else "head_dim"
    attention = Attention(
        num_heads=num_heads,
        num_kv_heads=config.size("num_key_value_heads", num_heads),
        head_dim=config.size(head_key, 128, limit=MAX_HEAD_DIM),
    )
    activation = config.choice("mlp_hidden_act", NEMOTRON_ACTIVATIONS, "relu2")
    dense = FeedForward(config.size("intermediate_size", 21_504), activation, config.flag("mlp_bias", False))
    layers = {
        "linear_attention": LayerSpec(_nemotron_mamba(config) if "linear_attention" in kinds else None, None),
        "full_attention": LayerSpec(attention, None),
        "mlp": LayerSpec(None, dense),
        "moe": LayerSpec(None, _nemotron_experts(config, activation) if "moe" in kinds else None),
    }
    eps = config.number("layer_norm_epsilon", 1e-5)
    spec = DecoderSpec(
        vocab_size=config.size("vocab_size", 131_072),
        hidden_size=hidden_size,
        layers=tuple(layers[kind] for kind in kinds),
        max_position_embeddings=config.size("max_position_embeddings", 4096, limit=MAX_POSITIONS),
        norm="rms_float",
        norm_eps=eps,
        is_head_tied=config.flag("tie_word_embeddings", False),
        weights=NEMOTRON_WEIGHTS,
    )
    return _with_nemotron_head(config, spec)


def _with_nemotron_head(config: ConfigReader, spec: DecoderSpec) -> DecoderSpec:
    """Return the spec with its MTP head, if it has one of attention and experts: two layers of one sublayer each."""
    if not config.size("num_nextn_predict_layers", 0, least=0, limit=MAX_LAYERS):
        return spec
    kinds = [NEMOTRON_OLDER.get(kind, kind) for kind in config.strings("mtp_layers_block_type", NEMOTRON_KINDS)]
    pattern = config.raw("mtp_hybrid_override_pattern") if config.has("mtp_hybrid_override_pattern") else "*E"
    experts = next((layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, Experts)), None)
    attention = next((layer.mixer for layer in spec.layers if layer.attention is not None), None)
    if (kinds or HEAD_KINDS) != HEAD_KINDS or pattern != "*E" or experts is None:
        return spec
    whole = replace(spec, layers=(LayerSpec(attention, experts),))
    head = with_mtp(
        whole, prefixes=("mtp.",), layer="layers.", mtp_norms=("layers.0.enorm", "layers.0.hnorm"),
        mtp_projection="layers.0.eh_proj", attention_norm="0.norm",
        qkv=tuple(f"0.{name}" for name in NEMOTRON_WEIGHTS.qkv), attention_out="0.mixer.o_proj",
        feed_forward_norm="1.norm", experts=_below("1.", NEMOTRON_EXPERTS), final_norm="layers.1.final_layernorm",
    ).mtp  # fmt: skip
    return replace(spec, mtp=head)


def _below(prefix: str, names: ExpertNames) -> ExpertNames:
    """Return the names of a mixture's modules behind a prefix."""
    return replace(
        names,
        router=prefix + names.router,
        router_bias=prefix + names.router_bias,
        expert_in=tuple(prefix + each for each in names.expert_in),
        expert_out=prefix + names.expert_out,
        shared_in=tuple(prefix + each for each in names.shared_in),
        shared_out=prefix + names.shared_out,
        latent_in=prefix + names.latent_in,
        latent_out=prefix + names.latent_out,
        stacked=tuple(
            replace(each, name=prefix + each.name, tensors=tuple(prefix + name for name in each.tensors))
            for each in names.stacked
        ),
    )


def _nemotron_layers(config: ConfigReader) -> list[str]:
    """Return the kinds of the layers: those of a list, or of a pattern with a character for each."""
    key = next((key for key in ("layers_block_type", "layer_types") if config.has(key)), "hybrid_override_pattern")
    if key == "hybrid_override_pattern":
        pattern = config.raw(key)
        if not isinstance(pattern, str) or not pattern or not set(pattern) <= NEMOTRON_LAYERS.keys():
            raise config.error(f"{key} must be a text of {' or '.join(NEMOTRON_LAYERS)}, got {pattern!r:.80}")
        kinds = [NEMOTRON_LAYERS[character] for character in pattern]
    else:
        kinds = [NEMOTRON_OLDER.get(kind, kind) for kind in config.strings(key, NEMOTRON_KINDS)]
    if not 0 < len(kinds) <= MAX_LAYERS:
        raise config.error(f"{key} must name 1 to {MAX_LAYERS} layers, not {len(kinds)}")
    if config.has("num_hidden_layers") and len(kinds) != config.size("num_hidden_layers", limit=MAX_LAYERS):
        raise config.error(f"{key} names {len(kinds)} layers, num_hidden_layers is {config.raw('num_hidden_layers')}")
    return kinds


def _nemotron_mamba(config: ConfigReader) -> Mamba:
    _check_time_steps(config)
    config.reject("mamba_hidden_act", "silu", "swish", why="the activation behind the convolution is silu")
    groups, taps, bias = (
        f"mamba_{key}" if config.has(f"mamba_{key}") else other
        for key, other in (("n_groups", "n_groups"), ("d_conv", "conv_kernel"), ("conv_bias", "use_conv_bias"))
    )
    return Mamba(
        num_groups=config.size(groups, 8, limit=MAX_HEADS),
        num_heads=config.size("mamba_num_heads", 128, limit=MAX_HEADS),
        state_dim=config.size("ssm_state_size", 128, limit=MAX_HEAD_DIM),
        head_dim=config.size("mamba_head_dim", 64, limit=MAX_HEAD_DIM),
        taps=config.size(taps, 4, limit=MAX_TAPS),
        has_conv_bias=config.flag(bias, True),
        has_bias=config.flag("use_bias", False),
    )


def _nemotron_experts(config: ConfigReader, activation: Activation) -> Experts:
    config.reject("mlp_bias", False, why="experts have no biases")
    config.reject("n_shared_experts", 1, why="one expert is used by all tokens")
    num_experts = config.size("n_routed_experts", 8, limit=MAX_EXPERTS)
    return Experts(
        num_experts=num_experts,
        num_active=config.size("num_experts_per_tok", 2, limit=num_experts),
        expert=FeedForward(config.size("moe_intermediate_size", 7688), activation),
        is_normalized=config.flag("norm_topk_prob", True),
        shared=FeedForward(config.size("moe_shared_expert_intermediate_size", 7688), activation),
        is_shared_scored=False,
        is_sigmoid=True,
        has_choice_bias=True,
        factor=config.number("routed_scaling_factor", 1.0),
        num_groups=config.size("n_group", 1, limit=num_experts),
        num_kept_groups=config.size("topk_group", 1, limit=num_experts),
        latent_size=config.size("moe_latent_size") if config.has("moe_latent_size") else 0,
    )


def _with_mambas(spec: DecoderSpec, mamba: Mamba | None, is_mamba: list[bool]) -> DecoderSpec:
    """Return a spec with a Mamba-2 in place of some layers' attention."""
    pairs = zip(spec.layers, is_mamba, strict=True)
    return replace(spec, layers=tuple(replace(layer, mixer=mamba) if each else layer for layer, each in pairs))


def _mamba(config: ConfigReader, inner: int | None = None) -> Mamba:
    """Return the Mamba-2 of a config that calls its sizes as Bamba does. `inner`: columns of its heads, if given."""
    _check_time_steps(config)
    _check_activation(config)
    hidden_size, num_heads = config.size("hidden_size"), config.size("mamba_n_heads", 128, limit=MAX_HEADS)
    if inner is None:
        inner = config.size("mamba_expand", 2, limit=64) * hidden_size
    return Mamba(
        num_groups=config.size("mamba_n_groups", 1, limit=MAX_HEADS),
        num_heads=num_heads,
        state_dim=config.size("mamba_d_state", 256, limit=MAX_HEAD_DIM),
        head_dim=_head_dim(config, inner, num_heads),
        taps=config.size("mamba_d_conv", 4, limit=MAX_TAPS),
        has_conv_bias=config.flag("mamba_conv_bias", True),
        has_bias=config.flag("mamba_proj_bias", False),
    )


def _head_dim(config: ConfigReader, inner: int, num_heads: int) -> int:
    """Return `mamba_d_head`, or what `inner` columns leave for each head; they must agree."""
    is_given = config.raw("mamba_d_head") not in (None, "auto")
    head_dim = config.size("mamba_d_head", limit=MAX_HEAD_DIM) if is_given else inner // num_heads
    if head_dim * num_heads != inner:
        what = f"mamba_d_head = {head_dim}, " if is_given else ""
        raise config.error(f"{what}mamba_n_heads = {num_heads}: heads must have the {inner} columns of a Mamba-2")
    return head_dim


def _check_activation(config: ConfigReader) -> None:
    config.reject("hidden_act", "silu", "swish", why="the activation behind the convolution is silu")


def _check_time_steps(config: ConfigReader) -> None:
    """Raise ModelError for limits that would change a time step: all are above 0, and none is infinite."""
    limits = config.raw("time_step_limit")
    if limits is None:
        return
    low, high = limits if isinstance(limits, list | tuple) and len(limits) == 2 else (None, None)
    if low not in (0, None) or high not in INFINITIES or isinstance(low, bool):
        what = f"time_step_limit = {limits!s:.80} is not supported"
        raise config.error(f"{what}: time steps are not clamped, it must be [0, Infinity]")
