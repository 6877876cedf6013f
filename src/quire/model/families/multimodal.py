"""Text models within models of images and text: the vision weights are not read, and requests with images are refused.

Their config.json has the text model's in `text_config`.
"""

from collections.abc import Callable
from dataclasses import replace

from quire.model.config_reader import ConfigReader
from quire.model.families.deepseek import mistral4
from quire.model.families.gemma import gemma3_text
from quire.model.llama import ministral3, mistral
from quire.model.spec import DecoderSpec

GEMMA3_SIZES = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072,
}  # fmt: skip
MISTRAL_SIZES = {"num_key_value_heads": 8, "max_position_embeddings": 131_072}
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


def _text(config: ConfigReader, defaults: dict[str, int]) -> ConfigReader:
    text = config.nested("text_config", config.section("text_config"))
    if config.has("tie_word_embeddings") or not text.has("tie_word_embeddings"):
        text = text.replaced(tie_word_embeddings=config.flag("tie_word_embeddings", True))
    for key, default in defaults.items():
        text = text.with_default(key, default)
    return text


def _within(spec: DecoderSpec) -> DecoderSpec:
    """Return the spec with the names that its tensors have beside those of the other parts."""
    heads = ("language_model.lm_head", "model.language_model.lm_head")
    return replace(spec, weights=replace(spec.weights, prefixes=PREFIXES, other_heads=heads, skipped=SKIPPED))
