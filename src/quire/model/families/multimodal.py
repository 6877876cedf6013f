"""Models of images and text: the text model, and the encoder of images where it is computed.

Their config.json has the text model's in `text_config`, and the encoder's in `vision_config`. Of the others the vision
weights are not read, and requests with images are refused.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quire.model.config_reader import MAX_LAYERS, MAX_SIZE, ConfigReader
from quire.model.families.deepseek import mistral4
from quire.model.families.gemma import gemma3_text
from quire.model.llama import ACTIVATIONS as GATED
from quire.model.llama import llama, ministral3, mistral, qwen2, qwen3
from quire.model.spec import (
    ACTIVATIONS,
    Attention,
    DecoderSpec,
    FeedForward,
    LayerSpec,
    Merging,
    NormKind,
    Rotary,
    VisionSpec,
    WeightMap,
)

GEMMA3_SIZES = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072,
}  # fmt: skip
MISTRAL_SIZES = {"num_key_value_heads": 8, "max_position_embeddings": 131_072}
LLAMA_SIZES = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip
CLIP_SIZES = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 32, "num_channels": 3,
}  # fmt: skip
TOWER_WEIGHTS = WeightMap(
    prefixes=("vision_tower.vision_model.", "model.vision_tower.vision_model.", "vision_tower.", "model.vision_tower."),
    layer="encoder.layers.{layer}.",
    embedding="embeddings.position_embedding",
    attention_norm="layer_norm1",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_out="self_attn.out_proj",
    feed_forward_norm="layer_norm2",
    feed_forward_in=("mlp.fc1",),
    feed_forward_out="mlp.fc2",
    final_norm="post_layernorm",
)
SIGLIP_SIZES = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 16, "num_channels": 3,
}  # fmt: skip
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
    "deepstack_visual_indexes": [8, 16, 24],
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
MAX_MERGE, MAX_FRAMES, MAX_WINDOW = 8, 8, 4096
CLIP = "clip_vision_model"
RENAMED = {"mm_input_projection_weight": "mm_input_projection.weight"}  # Gemma 3's projector
MAX_PATCHES = 2**16
PREFIXES = ("language_model.model.", "model.language_model.")  # as published; as transformers 5 writes them
SKIPPED = ("vision_tower.", "multi_modal_projector.", "vision_encoder.", "patch_merger.", "visual.")


def gemma3(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Gemma 3 of 4B and more: SigLIP, and tokens of one image that see each other."""
    spec = _within(gemma3_text(_text(config, GEMMA3_SIZES)))
    return replace(spec, vision=vision_of("gemma3", config, spec)) if config.has("vision_config") else spec


def mistral3(config: ConfigReader) -> DecoderSpec:
    """Return the spec of the text model in a Mistral Small 3.1, Ministral 3 or Mistral 4."""
    text = _text(config, MISTRAL_SIZES)
    families: dict[str, Callable[[ConfigReader], DecoderSpec]] = {
        "mistral": mistral, "ministral3": ministral3, "mistral4": mistral4,
    }  # fmt: skip
    return _within(text.choice("model_type", families, default="mistral")(text))


def llava(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a LLaVA 1.5 with a Llama, Mistral or Qwen2; with another encoder than CLIP, of its text."""
    text = _text(config, LLAMA_SIZES, is_tied=False)
    families: dict[str, Callable[[ConfigReader], DecoderSpec]] = {"llama": llama, "mistral": mistral, "qwen2": qwen2}
    spec = _within(text.choice("model_type", families, default="llama")(text))
    tower = config.nested("vision_config", config.section("vision_config"))
    if tower.raw("model_type") not in (None, CLIP):
        return spec
    return replace(spec, vision=vision_of("llava", config, spec))


def vision_of(family: str, config: ConfigReader, spec: DecoderSpec) -> VisionSpec:
    """Return the encoder of a family that a config describes, beside a decoder."""
    if family == "llava":
        return _llava_vision(config, _tower(config, CLIP_SIZES), spec)
    return _gemma3_vision(config, _tower(config, SIGLIP_SIZES), spec)


def qwen2_vl(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Qwen2-VL (Wang et al. 2024): images of any size, positions by row and column."""
    text, spec = _qwen2_text(config)
    if not config.has("vision_config"):
        return spec
    own = _tower(config, QWEN2_VL_SIZES)
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
    if not config.has("vision_config"):
        return spec
    own = _tower(config, QWEN25_VL_SIZES)
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
    text = _text(config, {}, is_tied=False) if config.has("text_config") else config
    text = text.with_default("rms_norm_eps", 1e-5)
    return text, _within(qwen2(_without_mrope(text, 1e6)), ("model.language_model.", "model."))


def qwen3_vl(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Qwen3-VL (2025): interpolated positions, and outputs of early layers of its encoder."""
    text = _text(config, {}, is_tied=False)
    spec = _within(qwen3(_without_mrope(text, 5e5)))
    if not config.has("vision_config"):
        return spec
    own = _tower(config, QWEN3_VL_SIZES)
    num_layers, num_positions = own.size("depth", limit=MAX_LAYERS), own.size("num_position_embeddings")
    deep_layers = own.raw("deepstack_visual_indexes")
    found = own.indices("deepstack_visual_indexes", num_layers)
    if not isinstance(deep_layers, list) or len(found) != len(deep_layers) or len(found) > spec.num_layers:
        limit = f"at most {spec.num_layers} layers, each once"
        raise config.error(f"deepstack_visual_indexes must be {limit}, got {deep_layers!r:.80}")
    if math.isqrt(num_positions) ** 2 != num_positions:
        raise config.error(f"num_position_embeddings {num_positions} must be a square")
    merging = Merging(_axes(text, spec, (24, 20, 20), is_interleaved=True), deep_layers=tuple(deep_layers))
    activation = own.choice("hidden_act", ACTIVATIONS, default="gelu_pytorch_tanh")
    feed_forward = FeedForward(own.size("intermediate_size"), activation, True)
    names = replace(QWEN_WEIGHTS, feed_forward_in=("mlp.linear_fc1",), feed_forward_out="mlp.linear_fc2")
    return _with_qwen_vision(
        config, own, spec, family="qwen3_vl",
        tower=_qwen_tower(own, feed_forward, num_positions, "layer", names),
        has_patch_bias=True,
        merging=merging,
        projector_norm="merger.norm",
        projector=("merger.linear_fc1", "merger.linear_fc2"),
    )  # fmt: skip


def _with_qwen_vision(
    config: ConfigReader, own: ConfigReader, spec: DecoderSpec, *, merging: Merging, **fields: Any  # noqa: ANN401
) -> DecoderSpec:
    """Return the spec of a text model with an encoder: its fields, and those that all Qwen-VL have."""
    width = own.size("out_hidden_size", spec.hidden_size)
    if width != spec.hidden_size:
        raise config.error(f"out_hidden_size {width} must be the text model's hidden_size {spec.hidden_size}")
    return replace(spec, vision=VisionSpec(
        image_token_id=_image_token(config, spec, 151_655),
        image_size=0,
        patch_size=own.size("patch_size"),
        num_channels=own.size("in_channels"),
        hidden_size=spec.hidden_size,
        pool=own.size("spatial_merge_size", limit=MAX_MERGE),
        projector_activation="gelu",
        projector_has_bias=True,
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


def _llava_vision(config: ConfigReader, clip: ConfigReader, spec: DecoderSpec) -> VisionSpec:
    """Return LLaVA's encoder: the hidden states behind one of the layers of a CLIP, without the class token."""
    num_layers = clip.size("num_hidden_layers", limit=MAX_LAYERS)
    chosen = config.raw("vision_feature_layer")
    chosen = -2 if chosen is None else chosen
    if isinstance(chosen, bool) or not isinstance(chosen, int) or not -num_layers <= chosen <= num_layers:
        raise config.error(f"vision_feature_layer must be from {-num_layers} to {num_layers}, got {chosen!r:.80}")
    num_used = chosen if chosen >= 0 else num_layers + 1 + chosen
    if not num_used:
        raise config.error("vision_feature_layer 0 is not supported yet: it is before the first layer")
    grid, patch_size = _grid(clip)
    layers = (_tower_layer(clip, "quick_gelu"),) * num_used
    return VisionSpec(
        family="llava",
        image_token_id=_image_token(config, spec, 32_000),
        tower=_encoder(clip, layers, grid**2 + 1, 1e-5, has_final_norm=False),
        image_size=grid * patch_size,
        patch_size=patch_size,
        num_channels=clip.size("num_channels"),
        hidden_size=spec.hidden_size,
        has_class_token=True,
        keeps_class_token=config.choice(
            "vision_feature_select_strategy", {"default": False, "full": True}, default="default"
        ),
        pre_norm="pre_layrnorm",
        projector_activation=config.choice("projector_hidden_act", ACTIVATIONS, default="gelu"),
        projector_has_bias=config.flag("multimodal_projector_bias", True),
    )


def _gemma3_vision(config: ConfigReader, siglip: ConfigReader, spec: DecoderSpec) -> VisionSpec:
    """Return Gemma 3's encoder: a SigLIP, means of squares of its rows, a norm and a matrix."""
    grid, patch_size = _grid(siglip)
    num_tokens = config.size("mm_tokens_per_image", 256, limit=MAX_PATCHES)
    side = math.isqrt(num_tokens)
    if side**2 != num_tokens or grid % side:
        raise config.error(f"mm_tokens_per_image {num_tokens} must be a square that divides {grid} x {grid} patches")
    layers = (_tower_layer(siglip, "gelu_pytorch_tanh"),) * siglip.size("num_hidden_layers", limit=MAX_LAYERS)
    return VisionSpec(
        family="gemma3",
        image_token_id=_image_token(config, spec, 262_144),
        tower=_encoder(siglip, layers, grid**2, 1e-6, has_final_norm=True),
        image_size=grid * patch_size,
        patch_size=patch_size,
        num_channels=siglip.size("num_channels"),
        hidden_size=spec.hidden_size,
        has_patch_bias=True,
        pool=grid // side,
        sees_whole=True,
        projector_norm="mm_soft_emb_norm",
        projector=("mm_input_projection",),
        is_projector_transposed=True,
    )


def _encoder(
    config: ConfigReader, layers: tuple[LayerSpec, ...], num_positions: int, norm_eps: float, *, has_final_norm: bool
) -> DecoderSpec:
    return DecoderSpec(
        vocab_size=num_positions,
        hidden_size=config.size("hidden_size"),
        layers=layers,
        max_position_embeddings=num_positions,
        norm="layer",
        norm_eps=config.number("layer_norm_eps", norm_eps),
        has_final_norm=has_final_norm,
        has_head=False,
        weights=TOWER_WEIGHTS,
    )


def _tower_layer(config: ConfigReader, activation: str) -> LayerSpec:
    num_heads = config.size("num_attention_heads")
    return LayerSpec(
        Attention(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=config.divided("hidden_size", num_heads),
            has_qkv_bias=True,
            has_attention_out_bias=True,
            is_causal=False,
        ),
        feed_forward=FeedForward(
            size=config.size("intermediate_size"),
            activation=config.choice("hidden_act", ACTIVATIONS, default=activation),
            has_bias=True,
        ),
    )


def _grid(config: ConfigReader) -> tuple[int, int]:
    """Return the patches in a row of a square image, and their size in pixels."""
    image_size, patch_size = config.size("image_size"), config.size("patch_size")
    if (grid := image_size // patch_size) ** 2 > MAX_PATCHES or not grid:
        raise config.error(f"image_size {image_size} and patch_size {patch_size} must give 1 to {MAX_PATCHES} patches")
    return grid, patch_size


def _image_token(config: ConfigReader, spec: DecoderSpec, default: int) -> int:
    key = "image_token_id" if config.has("image_token_id") else "image_token_index"
    token_id = config.size(key, default, least=0)
    if token_id >= spec.vocab_size:
        raise config.error(f"{key} {token_id} is not in the vocabulary of {spec.vocab_size}")
    return token_id


def _tower(config: ConfigReader, defaults: Mapping[str, object]) -> ConfigReader:
    tower = config.nested("vision_config", config.section("vision_config"))
    for key, default in defaults.items():
        tower = tower.with_default(key, default)
    return tower


def _text(config: ConfigReader, defaults: dict[str, int], *, is_tied: bool = True) -> ConfigReader:
    text = config.nested("text_config", config.section("text_config"))
    if config.has("tie_word_embeddings") or not text.has("tie_word_embeddings"):
        text = text.replaced(tie_word_embeddings=config.flag("tie_word_embeddings", is_tied))
    for key, default in defaults.items():
        text = text.with_default(key, default)
    return text


def _within(spec: DecoderSpec, prefixes: tuple[str, ...] = PREFIXES) -> DecoderSpec:
    """Return the spec with the names that its tensors have beside those of the other parts."""
    heads = ("language_model.lm_head", "model.language_model.lm_head")
    names = replace(spec.weights, prefixes=prefixes, other_heads=heads, skipped=SKIPPED, renamed=RENAMED)
    return replace(spec, weights=names)
