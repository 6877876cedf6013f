"""Qwen-VL: encoders of images of any size, and positions by row and column in the text model.

Wang et al. 2024 (Qwen2-VL); Bai et al. 2025 (Qwen2.5-VL). Qwen3-VL, with experts or without, and Qwen3.5 have encoders
of one kind; the text models of Qwen3.5 are those of `qwen3_next`.
"""

import math
from dataclasses import replace
from typing import Any

from quire.model.config_reader import MAX_LAYERS, MAX_SIZE, ConfigReader
from quire.model.families.mixture import qwen3_moe
from quire.model.families.multimodal import MAX_MERGE, MAX_PATCHES, image_token, text_config, tower_config, within
from quire.model.llama import ACTIVATIONS as GATED
from quire.model.llama import qwen2, qwen3
from quire.model.spec import (
    ACTIVATIONS,
    STACKED,
    Attention,
    DecoderSpec,
    ExpertNames,
    FeedForward,
    LayerSpec,
    Merging,
    NormKind,
    Rotary,
    VisionSpec,
    WeightMap,
)

QWEN2_VL_SIZES = {
    "depth": 32, "embed_dim": 1280, "num_heads": 16, "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}  # fmt: skip
QWEN25_VL_SIZES = {
    "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16, "in_channels": 3, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
QWEN3_VL_SIZES = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "in_channels": 3, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304,
}  # fmt: skip
QWEN3_VL_MOE_SIZES = {
    "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 128_000, "num_experts": 60,
    "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
}  # fmt: skip
QWEN_WEIGHTS = WeightMap(
    prefixes=("model.visual.", "visual."),
    layer="blocks.{layer}.",
    embedding="pos_embed",
    attention_norm="norm1",
    qkv=("attn.qkv",),
    attention_out="attn.proj",
    feed_forward_norm="norm2",
    feed_forward_in=("mlp.gate_proj", "mlp.up_proj"),
    feed_forward_out="mlp.down_proj",
    final_norm="",
)
IMAGE_TOKEN = 151_655
MAX_FRAMES, MAX_WINDOW = 8, 4096


def qwen2_vl(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Qwen2-VL (Wang et al. 2024): images of any size, positions by row and column."""
    text, spec = _qwen2_text(config)
    return with_qwen2_vision(config, text, spec) if config.has("vision_config") else spec


def with_qwen2_vision(config: ConfigReader, text: ConfigReader, spec: DecoderSpec) -> DecoderSpec:
    """Return the spec of a text model, which `text` describes, with the encoder of a Qwen2-VL."""
    own = tower_config(config, QWEN2_VL_SIZES)
    width, ratio = own.size("embed_dim"), own.number("mlp_ratio", 4)
    if not 1 <= width * ratio <= MAX_SIZE:
        raise config.error(f"mlp_ratio {ratio} of embed_dim {width} must give a width from 1 to {MAX_SIZE}")
    own = own.replaced(hidden_size=width, out_hidden_size=own.raw("hidden_size"))
    activation = own.choice("hidden_act", ACTIVATIONS, default="quick_gelu")
    names = replace(QWEN_WEIGHTS, feed_forward_in=("mlp.fc1",), feed_forward_out="mlp.fc2")
    return _with_qwen_vision(
        config, own, spec, family="qwen2_vl",
        tower=_qwen_tower(own, FeedForward(int(width * ratio), activation, True), 0, "layer", names),
        merging=Merging(_axes(text, spec, (16, 24, 24), is_interleaved=False)),
        projector_norm="merger.ln_q",
        projector=("merger.mlp.0", "merger.mlp.2"),
    )  # fmt: skip


def qwen2_5_vl(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Qwen2.5-VL (Bai et al. 2025): windows in the encoder, positions by row and column."""
    text, spec = _qwen2_text(config)
    return with_qwen2_5_vision(config, text, spec) if config.has("vision_config") else spec


def with_qwen2_5_vision(config: ConfigReader, text: ConfigReader, spec: DecoderSpec) -> DecoderSpec:
    """Return the spec of a text model, which `text` describes, with the encoder of a Qwen2.5-VL."""
    own = tower_config(config, QWEN25_VL_SIZES)
    axes = _axes(text, spec, (16, 24, 24), is_interleaved=False)
    merge, patch_size = own.size("spatial_merge_size", limit=MAX_MERGE), own.size("patch_size")
    num_layers, window = own.size("depth", limit=MAX_LAYERS), own.size("window_size", limit=MAX_WINDOW)
    merging = Merging(
        axes, window=window // merge // patch_size, whole_layers=own.indices("fullatt_block_indexes", num_layers)
    )
    if not merging.window:
        raise config.error(f"window_size {window} has no square of {merge} x {merge} patches of {patch_size} pixels")
    feed_forward = FeedForward(own.size("intermediate_size"), own.choice("hidden_act", GATED, default="silu"), True)
    return _with_qwen_vision(
        config, own, spec, family="qwen2_5_vl",
        tower=_qwen_tower(own, feed_forward, 0, "rms", QWEN_WEIGHTS),
        merging=merging,
        projector_norm="merger.ln_q",
        projector=("merger.mlp.0", "merger.mlp.2"),
    )  # fmt: skip


def _qwen2_text(config: ConfigReader) -> tuple[ConfigReader, DecoderSpec]:
    """Return the config and the spec of a text model, which is no part of the config in published ones."""
    text = text_config(config, {}, is_tied=False) if config.has("text_config") else config
    text = text.with_default("rms_norm_eps", 1e-5)
    return text, within(qwen2(_without_mrope(text, 1e6)), ("model.language_model.", "model."))


def qwen3_vl(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Qwen3-VL (2025): interpolated positions, and outputs of early layers of its encoder."""
    text = text_config(config, {}, is_tied=False)
    spec = within(qwen3(_without_mrope(text, 5e5)))
    return with_qwen3_vision(config, text, spec) if config.has("vision_config") else spec


def qwen3_vl_moe(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Qwen3-VL with experts (2025), in files as published or as transformers 5 writes them."""
    text = text_config(config, QWEN3_VL_MOE_SIZES, is_tied=False)
    text.reject("norm_topk_prob", True, why="weights of experts sum to 1")
    text.reject("use_sliding_window", False, why="its attention has no window")
    spec = qwen3_moe(_without_mrope(text, 5e5).replaced(norm_topk_prob=True))
    widths = spec.hidden_size, text.size("moe_intermediate_size")
    stacked = tuple(replace(each, width=width) for each, width in zip(STACKED, widths, strict=True))
    spec = replace(spec, weights=replace(spec.weights, experts=ExpertNames(stacked=stacked)))
    return with_qwen3_vision(config, text, within(spec)) if config.has("vision_config") else within(spec)


def with_qwen3_vision(config: ConfigReader, text: ConfigReader, spec: DecoderSpec) -> DecoderSpec:
    """Return the spec of a text model, which `text` describes, with the encoder of a Qwen3-VL."""
    own = tower_config(config, QWEN3_VL_SIZES | {"deepstack_visual_indexes": [8, 16, 24]})
    layers = own.raw("deepstack_visual_indexes")
    found = own.indices("deepstack_visual_indexes", own.size("depth", limit=MAX_LAYERS))
    if not isinstance(layers, list) or len(found) != len(layers) or len(found) > spec.num_layers:
        limit = f"at most {spec.num_layers} layers, each once"
        raise config.error(f"deepstack_visual_indexes must be {limit}, got {layers!r:.80}")
    return _with_qwen3_vision(config, text, spec, (24, 20, 20), deep_layers=tuple(layers))


def with_qwen3_5_vision(config: ConfigReader, text: ConfigReader, spec: DecoderSpec) -> DecoderSpec:
    """Return the spec of the text model in a Qwen3.5 with its encoder, if the config has one."""
    if not config.has("vision_config"):
        return spec
    own = tower_config(config, {})
    own.reject("deepstack_visual_indexes", [], why="the text model adds no outputs of its encoder's early layers")
    return _with_qwen3_vision(config, text, spec, (11, 11, 10), image_token_id=248_056)


def _with_qwen3_vision(
    config: ConfigReader, text: ConfigReader, spec: DecoderSpec, sections: tuple[int, int, int],
    deep_layers: tuple[int, ...] = (), image_token_id: int = IMAGE_TOKEN,
) -> DecoderSpec:  # fmt: skip
    """Return the spec of a text model with an encoder as Qwen3-VL's; `sections` and `image_token_id`: defaults."""
    own = tower_config(config, QWEN3_VL_SIZES)
    num_positions = own.size("num_position_embeddings")
    if math.isqrt(num_positions) ** 2 != num_positions:
        raise config.error(f"num_position_embeddings {num_positions} must be a square")
    merging = Merging(_axes(text, spec, sections, is_interleaved=True), deep_layers=deep_layers)
    activation = own.choice("hidden_act", ACTIVATIONS, default="gelu_pytorch_tanh")
    feed_forward = FeedForward(own.size("intermediate_size"), activation, True)
    names = replace(QWEN_WEIGHTS, feed_forward_in=("mlp.linear_fc1",), feed_forward_out="mlp.linear_fc2")
    return _with_qwen_vision(
        config, own, spec, family="qwen3_vl", image_token_id=image_token_id,
        tower=_qwen_tower(own, feed_forward, num_positions, "layer", names),
        has_patch_bias=True,
        merging=merging,
        projector_norm="merger.norm",
        projector=("merger.linear_fc1", "merger.linear_fc2"),
    )  # fmt: skip


def _with_qwen_vision(
    config: ConfigReader, own: ConfigReader, spec: DecoderSpec, *, merging: Merging, image_token_id: int = IMAGE_TOKEN,
    **fields: Any,  # noqa: ANN401
) -> DecoderSpec:  # fmt: skip
    """Return the spec of a text model with an encoder: its fields, and those that all Qwen-VL have."""
    width = own.size("out_hidden_size", spec.hidden_size)
    if width != spec.hidden_size:
        raise config.error(f"out_hidden_size {width} must be the text model's hidden_size {spec.hidden_size}")
    return replace(spec, vision=VisionSpec(
        image_token_id=image_token(config, spec, image_token_id),
        image_size=0,
        patch_size=own.size("patch_size"),
        num_channels=own.size("in_channels"),
        hidden_size=spec.hidden_size,
        pool=own.size("spatial_merge_size", limit=MAX_MERGE),
        projector_activation="gelu",
        projector_has_bias=True,
        projector_size=own.size("hidden_size") * own.size("spatial_merge_size") ** 2,
        patches="patch_embed.proj",
        projector_prefixes=QWEN_WEIGHTS.prefixes,
        merging=replace(merging, num_frames=own.size("temporal_patch_size", limit=MAX_FRAMES)),
        **fields,
    ))  # fmt: skip


def _qwen_tower(
    own: ConfigReader, feed_forward: FeedForward, num_positions: int, norm: NormKind, names: WeightMap
) -> DecoderSpec:
    """Return the layers of an encoder with rotary positions by row and column."""
    num_heads, num_layers = own.size("num_heads"), own.size("depth", limit=MAX_LAYERS)
    head_dim = own.divided("hidden_size", num_heads)
    if head_dim % 4:
        raise own.error(f"heads of {head_dim} dimensions cannot be rotated by row and column: multiples of 4 can")
    rope = own.nested("rope_parameters", own.section("rope_parameters"))
    attention = Attention(
        num_heads, num_heads, head_dim, has_qkv_bias=True, has_attention_out_bias=True, is_causal=False
    )
    return DecoderSpec(
        vocab_size=num_positions,
        hidden_size=own.size("hidden_size"),
        layers=(LayerSpec(attention, feed_forward),) * num_layers,
        max_position_embeddings=MAX_PATCHES,
        norm=norm,
        norm_eps=1e-6,
        rotary=Rotary(head_dim, rope.number("rope_theta", 10_000.0), MAX_PATCHES),
        has_final_norm=False,
        has_head=False,
        weights=names,
    )


def _without_mrope(text: ConfigReader, theta: float) -> ConfigReader:
    """Return a text model's config in which rotary positions are those of texts: with one position for each token."""
    changed = {
        key: {**section, "type": "default", "rope_type": "default"}
        for key in ("rope_scaling", "rope_parameters")
        if "mrope" in ((section := text.section(key)).get("type"), section.get("rope_type"))
    }
    return text.replaced(**changed).with_default("rope_theta", theta)


def _axes(
    text: ConfigReader, spec: DecoderSpec, default: tuple[int, int, int], *, is_interleaved: bool
) -> tuple[int, ...]:
    """Return which of an image token's positions turns each rotary pair of the decoder, by `mrope_section`.

    Sections are one after the other (Wang et al. 2024), or pairs of row and column in turns with those of time (2025).
    """
    rope = text.nested("rope parameters", text.section("rope_scaling") or text.section("rope_parameters"))
    assert spec.rotary is not None
    num_pairs = spec.rotary.head_dim // 2
    given = rope.raw("mrope_section")
    sections = default if given is None else given if isinstance(given, list) else ()
    if len(sections) != 3 or any(type(each) is not int or each < 0 for each in sections) or sum(sections) != num_pairs:
        shown = list(default) if given is None else given
        raise rope.error(f"mrope_section must be three numbers of pairs, {num_pairs} in all, got {shown!r:.80}")
    if not is_interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    if max(sections[1] * 3 - 2, sections[2] * 3 - 1) > num_pairs:
        raise rope.error(f"mrope_section {sections} does not fit in turns into {num_pairs} pairs")
    own = {index: axis for axis in (1, 2) for index in range(axis, sections[axis] * 3, 3)}
    return tuple(own.get(index, 0) for index in range(num_pairs))
