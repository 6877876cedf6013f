"""Models of images and text: the text model, and the encoder of images where it is computed.

Their config.json has the text model's in `text_config`, and the encoder's in `vision_config`. Of the others the vision
weights are not read, and requests with images are refused.
"""

from collections.abc import Callable
from dataclasses import replace

from quire.model.config_reader import MAX_LAYERS, ConfigReader
from quire.model.families.deepseek import mistral4
from quire.model.families.gemma import gemma3_text
from quire.model.llama import llama, ministral3, mistral, qwen2
from quire.model.spec import ACTIVATIONS, Attention, DecoderSpec, FeedForward, LayerSpec, VisionSpec, WeightMap

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
CLIP_WEIGHTS = WeightMap(
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
CLIP = "clip_vision_model"
MAX_PATCHES = 2**16
PREFIXES = ("language_model.model.", "model.language_model.")  # as published; as transformers 5 writes them
SKIPPED = ("vision_tower.", "multi_modal_projector.", "vision_encoder.", "patch_merger.")


def gemma3(config: ConfigReader) -> DecoderSpec:
    """Return the spec of the text model in a Gemma 3 of 4B and more."""
    return _within(gemma3_text(_text(config, GEMMA3_SIZES)))


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
    vision = _llava_vision(config, _clip(tower), spec)
    return replace(spec, vision=vision)


def _llava_vision(config: ConfigReader, clip: ConfigReader, spec: DecoderSpec) -> VisionSpec:
    """Return LLaVA's encoder: the hidden states behind one of the layers of a CLIP, without the class token."""
    num_layers, width = clip.size("num_hidden_layers", limit=MAX_LAYERS), clip.size("hidden_size")
    image_size, patch_size = clip.size("image_size"), clip.size("patch_size")
    if (grid := image_size // patch_size) ** 2 > MAX_PATCHES or not grid:
        raise clip.error(f"image_size {image_size} and patch_size {patch_size} must give 1 to {MAX_PATCHES} patches")
    chosen = config.raw("vision_feature_layer")
    chosen = -2 if chosen is None else chosen
    if isinstance(chosen, bool) or not isinstance(chosen, int) or not -num_layers <= chosen <= num_layers:
        raise config.error(f"vision_feature_layer must be from {-num_layers} to {num_layers}, got {chosen!r:.80}")
    num_used = chosen if chosen >= 0 else num_layers + 1 + chosen
    if not num_used:
        raise config.error("vision_feature_layer 0 is not supported yet: it is before the first layer")
    token_key = "image_token_id" if config.has("image_token_id") else "image_token_index"
    token_id = config.size(token_key, 32_000, least=0)
    if token_id >= spec.vocab_size:
        raise config.error(f"{token_key} {token_id} is not in the vocabulary of {spec.vocab_size}")
    num_heads = clip.size("num_attention_heads")
    layer = LayerSpec(
        Attention(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=clip.divided("hidden_size", num_heads),
            has_qkv_bias=True,
            has_attention_out_bias=True,
            is_causal=False,
        ),
        feed_forward=FeedForward(
            size=clip.size("intermediate_size"),
            activation=clip.choice("hidden_act", ACTIVATIONS, default="quick_gelu"),
            has_bias=True,
        ),
    )
    return VisionSpec(
        family="llava",
        image_token_id=token_id,
        tower=DecoderSpec(
            vocab_size=grid**2 + 1,
            hidden_size=width,
            layers=(layer,) * num_used,
            max_position_embeddings=grid**2 + 1,
            norm="layer",
            norm_eps=clip.number("layer_norm_eps", 1e-5),
            has_final_norm=False,
            has_head=False,
            weights=CLIP_WEIGHTS,
        ),
        image_size=grid * patch_size,
        patch_size=patch_size,
        num_channels=clip.size("num_channels"),
        has_class_token=True,
        keeps_class_token=config.choice(
            "vision_feature_select_strategy", {"default": False, "full": True}, default="default"
        ),
        projector_activation=config.choice("projector_hidden_act", ACTIVATIONS, default="gelu"),
        projector_has_bias=config.flag("multimodal_projector_bias", True),
        hidden_size=spec.hidden_size,
    )


def _clip(config: ConfigReader) -> ConfigReader:
    for key, default in CLIP_SIZES.items():
        config = config.with_default(key, default)
    return config


def _text(config: ConfigReader, defaults: dict[str, int], *, is_tied: bool = True) -> ConfigReader:
    text = config.nested("text_config", config.section("text_config"))
    if config.has("tie_word_embeddings") or not text.has("tie_word_embeddings"):
        text = text.replaced(tie_word_embeddings=config.flag("tie_word_embeddings", is_tied))
    for key, default in defaults.items():
        text = text.with_default(key, default)
    return text


def _within(spec: DecoderSpec) -> DecoderSpec:
    """Return the spec with the names that its tensors have beside those of the other parts."""
    heads = ("language_model.lm_head", "model.language_model.lm_head")
    return replace(spec, weights=replace(spec.weights, prefixes=PREFIXES, other_heads=heads, skipped=SKIPPED))
