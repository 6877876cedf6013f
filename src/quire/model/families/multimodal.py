"""Models of images and text: the text model, and the encoder of images where it is computed.

Their config.json has the text model's in `text_config`, and the encoder's in `vision_config`. Of the others the vision
weights are not read, and requests with images are refused.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from quire.core.image_processing import MAX_EDGE
from quire.model.config_reader import MAX_LAYERS, ConfigReader
from quire.model.families.deepseek import mistral4
from quire.model.families.gemma import gemma3_text, gemma4_text
from quire.model.llama import llama, ministral3, mistral, qwen2, qwen3
from quire.model.spec import (
    ACTIVATIONS,
    Activation,
    Attention,
    DecoderSpec,
    FeedForward,
    LayerSpec,
    Merging,
    Rotary,
    Tiles,
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
PIXTRAL_SIZES = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_channels": 3, "patch_size": 16,
}  # fmt: skip
PIXTRAL_WEIGHTS = WeightMap(
    prefixes=("vision_tower.", "model.vision_tower."),
    layer="transformer.layers.{layer}.",
    embedding="",
    attention_norm="attention_norm",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    attention_out="attention.o_proj",
    feed_forward_norm="ffn_norm",
    feed_forward_in=("feed_forward.gate_proj", "feed_forward.up_proj"),
    feed_forward_out="feed_forward.down_proj",
    final_norm="",
)
SIGLIP_SIZES = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 16, "num_channels": 3,
}  # fmt: skip
ONEVISION_SIZES = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26, "num_attention_heads": 16,
    "image_size": 384, "patch_size": 14, "num_channels": 3,
}  # fmt: skip
MAX_SIZES = 64
CLIP, PIXTRAL = "clip_vision_model", "pixtral"
GATED: dict[str, Activation] = {"gelu": "gelu_and_mul", "silu": "silu_and_mul"}
RENAMED = {
    "mm_input_projection_weight": "mm_input_projection.weight",     # Gemma 3's projector
    "image_newline": "image_newline.weight",                        # LLaVA-OneVision's
}  # fmt: skip
MAX_PATCHES = 2**16
MAX_MERGE = 8
PREFIXES = ("language_model.model.", "model.language_model.")  # as published; as transformers 5 writes them
SKIPPED = ("vision_tower.", "multi_modal_projector.", "vision_encoder.", "patch_merger.", "visual.")
GEMMA4_SKIPPED = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")


def gemma3(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Gemma 3 of 4B and more: SigLIP, and tokens of one image that see each other."""
    spec = within(gemma3_text(text_config(config, GEMMA3_SIZES)))
    return replace(spec, vision=vision_of("gemma3", config, spec)) if config.has("vision_config") else spec


def gemma4(config: ConfigReader) -> DecoderSpec:
    """Return the spec of the text model in a Gemma 4."""
    own = gemma4_text(text_config(config, {}))
    spec, names = within(own), own.weights
    skipped, renamed = (*names.skipped, *GEMMA4_SKIPPED), names.renamed
    return replace(spec, weights=replace(spec.weights, skipped=skipped, renamed=renamed))


def mistral3(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a Mistral Small 3.1, Ministral 3 or Mistral 4: images of any size, by a Pixtral."""
    text = text_config(config, MISTRAL_SIZES)
    families: dict[str, Callable[[ConfigReader], DecoderSpec]] = {
        "mistral": mistral, "ministral3": ministral3, "mistral4": mistral4,
    }  # fmt: skip
    spec = within(text.choice("model_type", families, default="mistral")(text))
    own = tower_config(config, PIXTRAL_SIZES | {"patch_size": 14})
    if not config.has("vision_config") or own.raw("model_type") not in (None, PIXTRAL):
        return spec
    return replace(spec, vision=mistral3_vision(config, own, spec, text.number("rms_norm_eps", 1e-5)))


def llava(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a LLaVA 1.5 or a Pixtral, with a Llama, Mistral or Qwen2; with others, of its text."""
    text = text_config(config, LLAMA_SIZES, is_tied=False)
    families: dict[str, Callable[[ConfigReader], DecoderSpec]] = {"llama": llama, "mistral": mistral, "qwen2": qwen2}
    spec = within(text.choice("model_type", families, default="llama")(text))
    tower = config.nested("vision_config", config.section("vision_config"))
    if tower.raw("model_type") == PIXTRAL:
        config.choice("vision_feature_select_strategy", {"full": True}, default="full")
        return replace(spec, vision=pixtral_vision(config, tower_config(config, PIXTRAL_SIZES), spec))
    if tower.raw("model_type") not in (None, CLIP):
        return spec
    return replace(spec, vision=vision_of("llava", config, spec))


def llava_onevision(config: ConfigReader) -> DecoderSpec:
    """Return the spec of a LLaVA-OneVision with a Qwen2 or Llama (Li et al. 2024): images of any size, in tiles."""
    text = text_config(config, {}, is_tied=False)
    families: dict[str, Callable[[ConfigReader], DecoderSpec]] = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3}
    spec = within(text.choice("model_type", families, default="qwen2")(text))
    if not config.has("vision_config"):
        return spec
    own = tower_config(config, ONEVISION_SIZES)
    own.choice("model_type", {"siglip_vision_model": True}, default="siglip_vision_model")
    config.choice("vision_feature_select_strategy", {"full": True}, default="full")
    grid, patch_size = _grid(own)
    layers = (_tower_layer(own, "gelu_pytorch_tanh"),) * _num_used_layers(config, own, -1)
    return replace(spec, vision=VisionSpec(
        family="llava_onevision",
        image_token_id=image_token(config, spec, 151_646),
        tower=_encoder(own, layers, grid**2, 1e-6, has_final_norm=False),
        image_size=grid * patch_size,
        patch_size=patch_size,
        num_channels=own.size("num_channels"),
        hidden_size=spec.hidden_size,
        has_patch_bias=True,
        projector_activation=config.choice("projector_hidden_act", ACTIVATIONS, default="gelu"),
        projector_has_bias=config.flag("multimodal_projector_bias", True),
        tiles=_tiles(config, own.size("image_size")),
    ))  # fmt: skip


def _tiles(config: ConfigReader, size: int) -> Tiles:
    """Return how images are cut, by `image_grid_pinpoints` and `vision_aspect_ratio`."""
    given = config.raw("image_grid_pinpoints")
    if given is None:
        edges = range(384, 2305, 384)
        given = [[height, width] for height in edges for width in edges]
    pairs = given if isinstance(given, list) else []
    if not 0 < len(pairs) <= MAX_SIZES or not all(_is_of_tiles(each, size) for each in pairs):
        what = f"1 to {MAX_SIZES} pairs of a height and a width up to {MAX_EDGE}, multiples of image_size {size}"
        raise config.error(f"image_grid_pinpoints must be {what}, got {given!r:.80}")
    ratio = config.raw("vision_aspect_ratio")
    found = re.fullmatch("anyres_max_([1-9][0-9]?)", ratio) if isinstance(ratio, str) else None
    if ratio is not None and found is None:
        raise config.error(f"vision_aspect_ratio must be anyres_max_N with N from 1 to 99, got {ratio!r:.80}")
    return Tiles(size, tuple((height, width) for height, width in pairs), 9 if found is None else int(found[1]))


def _is_of_tiles(edges: object, size: int) -> bool:
    return isinstance(edges, list) and len(edges) == 2 and all(
        type(each) is int and 0 < each <= MAX_EDGE and not each % size for each in edges
    )


def vision_of(family: str, config: ConfigReader, spec: DecoderSpec) -> VisionSpec:
    """Return the encoder of a family that a config describes, beside a decoder."""
    if family == "llava":
        return _llava_vision(config, tower_config(config, CLIP_SIZES), spec)
    return _gemma3_vision(config, tower_config(config, SIGLIP_SIZES), spec)


def _llava_vision(config: ConfigReader, clip: ConfigReader, spec: DecoderSpec) -> VisionSpec:
    """Return LLaVA's encoder: the hidden states behind one of the layers of a CLIP, without the class token."""
    grid, patch_size = _grid(clip)
    layers = (_tower_layer(clip, "quick_gelu"),) * _num_used_layers(config, clip, -2)
    return VisionSpec(
        family="llava",
        image_token_id=image_token(config, spec, 32_000),
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


def _num_used_layers(config: ConfigReader, own: ConfigReader, default: int) -> int:
    """Return how many layers of an encoder are computed, by `vision_feature_layer`."""
    num_layers = own.size("num_hidden_layers", limit=MAX_LAYERS)
    chosen = config.raw("vision_feature_layer")
    chosen = default if chosen is None else chosen
    if isinstance(chosen, bool) or not isinstance(chosen, int) or not -num_layers <= chosen <= num_layers:
        raise config.error(f"vision_feature_layer must be from {-num_layers} to {num_layers}, got {chosen!r:.80}")
    num_used = chosen if chosen >= 0 else num_layers + 1 + chosen
    if not num_used:
        raise config.error("vision_feature_layer 0 is not supported yet: it is before the first layer")
    return num_used


def mistral3_vision(config: ConfigReader, own: ConfigReader, spec: DecoderSpec, eps: float) -> VisionSpec:
    """Return Mistral 3's encoder: a Pixtral, a norm, and a layer that joins squares; `eps`: the text model's norms'."""
    pool = config.size("spatial_merge_size", 2, limit=MAX_MERGE)
    vision = pixtral_vision(config, own, spec, pool, has_bias=False)
    merging = Merging(has_column_frequencies=True, merger="patch_merger.merging_layer")
    return replace(vision, projector_norm="norm", projector_norm_eps=eps, merging=merging)


def pixtral_vision(
    config: ConfigReader, own: ConfigReader, spec: DecoderSpec, pool: int = 1, *, has_bias: bool = True
) -> VisionSpec:
    """Return Pixtral's encoder (Agrawal et al. 2024): a row of tokens for each row of patches, or of their squares."""
    num_heads = own.size("num_attention_heads")
    head_dim = own.divided("hidden_size", num_heads)
    if head_dim % 4:
        raise own.error(f"heads of {head_dim} dimensions cannot be rotated by row and column: multiples of 4 can")
    rope = own.nested("rope_parameters", own.section("rope_parameters"))
    theta = rope.number("rope_theta", own.number("rope_theta", 10_000.0))
    attention = Attention(num_heads, num_heads, head_dim, is_causal=False)
    feed_forward = FeedForward(own.size("intermediate_size"), own.choice("hidden_act", GATED, default="gelu"))
    tower = DecoderSpec(
        vocab_size=0,
        hidden_size=own.size("hidden_size"),
        layers=(LayerSpec(attention, feed_forward),) * _num_used_layers(config, own, -1),
        max_position_embeddings=MAX_PATCHES,
        norm="rms",
        norm_eps=1e-5,
        rotary=Rotary(head_dim, theta, MAX_PATCHES),
        has_final_norm=False,
        has_head=False,
        weights=PIXTRAL_WEIGHTS,
    )
    return VisionSpec(
        family="pixtral",
        image_token_id=image_token(config, spec, 10),
        tower=tower,
        image_size=0,
        patch_size=own.size("patch_size"),
        num_channels=own.size("num_channels"),
        hidden_size=spec.hidden_size,
        pool=pool,
        has_row_ends=True,
        patches="patch_conv",
        pre_norm="ln_pre",
        projector_activation=config.choice("projector_hidden_act", ACTIVATIONS, default="gelu"),
        projector_has_bias=config.flag("multimodal_projector_bias", has_bias),
        merging=Merging(has_column_frequencies=True),
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
        image_token_id=image_token(config, spec, 262_144),
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


def image_token(config: ConfigReader, spec: DecoderSpec, default: int) -> int:
    """Return the token that stands for an image in prompts. ModelError for one that is not in the vocabulary."""
    key = "image_token_id" if config.has("image_token_id") else "image_token_index"
    token_id = config.size(key, default, least=0)
    if token_id >= spec.vocab_size:
        raise config.error(f"{key} {token_id} is not in the vocabulary of {spec.vocab_size}")
    return token_id


def tower_config(config: ConfigReader, defaults: Mapping[str, object]) -> ConfigReader:
    """Return the part of a config that is about the encoder, with defaults."""
    tower = config.nested("vision_config", config.section("vision_config"))
    for key, default in defaults.items():
        tower = tower.with_default(key, default)
    return tower


def text_config(config: ConfigReader, defaults: dict[str, int], *, is_tied: bool = True) -> ConfigReader:
    """Return the part of a config that is about the text model, with defaults; `is_tied`: its head, if none says so."""
    text = config.nested("text_config", config.section("text_config"))
    if config.has("tie_word_embeddings") or not text.has("tie_word_embeddings"):
        text = text.replaced(tie_word_embeddings=config.flag("tie_word_embeddings", is_tied))
    for key, default in defaults.items():
        text = text.with_default(key, default)
    return text


def within(spec: DecoderSpec, prefixes: tuple[str, ...] = PREFIXES) -> DecoderSpec:
    """Return the spec with the names that its tensors have beside those of the other parts."""
    heads = ("language_model.lm_head", "model.language_model.lm_head")
    names = replace(spec.weights, prefixes=prefixes, other_heads=heads, skipped=SKIPPED, renamed=RENAMED)
    return replace(spec, weights=names)
