"""Qwen3-Next, Qwen3.5 and Qwen3.6: gated delta nets in most layers, gated attention in the others (2025).

Norms are with 1 + weight, but for that of a delta net. A quarter of a head's dimensions is rotated. The MTP head of a
checkpoint (`mtp.`) is read for drafts alone. Encoders of images are those of `qwen_vl`.
"""

from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from typing import Any

from quire.kernels.delta_net import MAX_TAPS
from quire.model.config_reader import MAX_HEAD_DIM, MAX_LAYERS, ConfigReader
from quire.model.families.mixture import shared_experts, with_experts
from quire.model.families.multimodal import text_config
from quire.model.families.qwen_vl import with_qwen3_5_vision
from quire.model.llama import WEIGHTS as LLAMA_WEIGHTS
from quire.model.llama import llama
from quire.model.spec import DecoderSpec, DeltaNet, ExpertNames, with_mtp

PARTIAL_ROTARY = 0.25
HEAD_DIM = 256
MAX_STATE_HEADS = 2**16
LAYER_TYPES = ("linear_attention", "full_attention")
FULL_INTERVAL = 4
SKIPPED = ("mtp.", "visual.")
WEIGHTS = replace(
    LLAMA_WEIGHTS,
    prefixes=("model.", "model.language_model.", ""),
    delta_in=("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    delta_rates=("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    delta_conv=("linear_attn.conv1d",),
    delta_rate="linear_attn.A_log",
    delta_rate_bias="linear_attn.dt_bias",
    delta_norm="linear_attn.norm",
    delta_out="linear_attn.out_proj",
    experts=ExpertNames(),
    skipped=SKIPPED,
)
GROUPED_WEIGHTS = replace(
    WEIGHTS, prefixes=LLAMA_WEIGHTS.prefixes, delta_in=("linear_attn.in_proj_qkvz",),
    delta_rates=("linear_attn.in_proj_ba",),
)  # fmt: skip
QWEN3_5_SIZES = {
    "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32_768,
}  # fmt: skip
QWEN3_5_MOE_SIZES = QWEN3_5_SIZES | {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2}


def qwen3_next(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Qwen3-Next: projections of delta nets are stored by key heads."""
    spec = _hybrid(config.with_default("num_key_value_heads", 2))
    mixture = shared_experts(config, 512, 10, is_normalized=config.flag("norm_topk_prob", True))
    return _with_head(config, replace(with_experts(config, spec, mixture), weights=GROUPED_WEIGHTS))


def qwen3_5_text(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Qwen3.5 or Qwen3.6 for text."""
    return _with_head(config, _hybrid(_with_defaults(config, QWEN3_5_SIZES)))


def qwen3_5_moe_text(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Qwen3.5 or Qwen3.6 with experts, in all layers, for text."""
    spec = _hybrid(_with_defaults(config, QWEN3_5_MOE_SIZES))
    mixture = shared_experts(config, 256, 8, is_normalized=True)
    return _with_head(config, spec.with_layers(partial(replace, feed_forward=mixture)))


def qwen3_5(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Qwen3.5 or Qwen3.6: images of any size, positions by row and column."""
    return _text(config, qwen3_5_text)


def qwen3_5_moe(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Qwen3.5 or Qwen3.6 with experts: images of any size, positions by row and column."""
    return _text(config, qwen3_5_moe_text)


def _text(config: ConfigReader, family: Callable[[ConfigReader], DecoderSpec]) -> DecoderSpec:
    text = text_config(config, {}, is_tied=False)
    spec = family(text)
    spec = replace(spec, weights=replace(spec.weights, prefixes=("model.language_model.", "model.", "")))
    return with_qwen3_5_vision(config, text, spec)


def _with_head(config: ConfigReader, spec: DecoderSpec) -> DecoderSpec:
    """Return the spec with its MTP head; published configs of Qwen3-Next do not name theirs."""
    if not config.size("mtp_num_hidden_layers", 1, least=0, limit=MAX_LAYERS):
        return spec
    norms = "pre_fc_norm_embedding", "pre_fc_norm_hidden"
    return with_mtp(spec, prefixes=("mtp.",), mtp_norms=norms, mtp_projection="fc")


def _with_defaults(config: ConfigReader, sizes: dict[str, int]) -> ConfigReader:
    for key, default in sizes.items():
        config = config.with_default(key, default)
    return config


def _hybrid(config: ConfigReader) -> DecoderSpec:
    """Return the spec of all of them, with dense feed-forwards."""
    config = config.with_default("head_dim", HEAD_DIM)
    config.reject("mlp_bias", False, why="its feed-forwards have no biases")
    config.reject("use_sliding_window", False, why="its attention has no window")
    config.reject("attn_output_gate", True, why="results of attention are gated")
    config.reject("output_gate_type", "swish", "silu", why="results of delta nets are gated by silu")
    spec = llama(config, partial_rotary=PARTIAL_ROTARY)
    spec = spec.with_attention(has_query_key_norm=True, has_output_gate=True)
    net = DeltaNet(
        num_key_heads=config.size("linear_num_key_heads", 16, limit=MAX_STATE_HEADS),
        num_value_heads=config.size("linear_num_value_heads", 32, limit=MAX_STATE_HEADS),
        key_dim=config.size("linear_key_head_dim", 128, limit=MAX_HEAD_DIM),
        value_dim=config.size("linear_value_head_dim", 128, limit=MAX_HEAD_DIM),
        taps=config.size("linear_conv_kernel_dim", 4, limit=MAX_TAPS),
    )
    interval = config.size("full_attention_interval", FULL_INTERVAL, limit=MAX_LAYERS)
    spec = with_delta_nets(config, spec, net, range(interval - 1, spec.num_layers, interval))
    return replace(spec, norm="rms_offset", weights=WEIGHTS)


def with_delta_nets(
    config: ConfigReader, spec: DecoderSpec, net: DeltaNet, attending: Container[int], **changes: Any  # noqa: ANN401 (any field)
) -> DecoderSpec:
    """Return a spec with delta nets where `layer_types` says so, and with changed fields of their layers.

    `attending`: the layers that have attention if `layer_types` is missing.
    """
    types = config.strings("layer_types", LAYER_TYPES)
    types = types or [LAYER_TYPES[index in attending] for index in range(spec.num_layers)]
    if len(types) != spec.num_layers:
        raise config.error(f"layer_types has {len(types)} entries for {spec.num_layers} layers")
    pairs = zip(spec.layers, types, strict=True)
    layers = (replace(layer, mixer=net, **changes) if kind == LAYER_TYPES[0] else layer for layer, kind in pairs)
    return replace(spec, layers=tuple(layers))
