"""Encoder of images in a GGUF file of its own, which llama.cpp calls mmproj, beside the file of a text model.

Files of LLaVA 1.5 are an older converter's: `block_count` is that of the layers that are used, which leaves out the
last one, `clip.vision.projection_dim` is CLIP's own, and the first layer of a feed-forward is called `ffn_down`, the
second `ffn_up`. In Gemma 3's files the norm before the projector is stored plus 1. No file has a token for images.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quire.formats.gguf.gguf_config import TOKENS
from quire.formats.gguf.gguf_file import GGUFFile, Metadata, MetadataArray
from quire.model.config_reader import MAX_LAYERS, ConfigReader
from quire.model.families.multimodal import vision_of
from quire.model.spec import DecoderSpec, VisionSpec, WeightMap

ARCHITECTURE = "clip"
RAISED = frozenset(("mm.soft_emb_norm.weight",))  # stored plus 1
GEMMA3_POOL = 4
_UNKNOWN_TOKEN = "tokenizer.ggml.unknown_token_id"  # noqa: S105 (no password)
_FAMILIES = {"mlp": "llava", "gemma3": "gemma3"}    # clip.projector_type -> family
_TEXT_MODELS = {"llava": ("llama", "qwen2"), "gemma3": ("gemma3",)}  # family -> general.architecture of its texts
_IMAGE_TOKENS = {"llava": "<image>", "gemma3": "<image_soft_token>"}
_CUTTING = ("vision.image_grid_pinpoints", "vision.image_aspect_ratio", "vision.mm_patch_merge_type")
_OTHERS = {  # tensors of other encoders and projectors, which have the same projector type
    "llava": ("mm.1.weight", "mm.3.weight", "mm.4.weight", "v.post_ln.weight", "v.patch_embd.bias"), "gemma3": (),
}  # fmt: skip
_WEIGHTS = WeightMap(
    prefixes=("v.",),
    layer="blk.{layer}.",
    embedding="position_embd",
    attention_norm="ln1",
    qkv=("attn_q", "attn_k", "attn_v"),
    attention_out="attn_out",
    feed_forward_norm="ln2",
    feed_forward_in=("ffn_up",),
    feed_forward_out="ffn_down",
    final_norm="post_ln",
)


@dataclass(frozen=True, slots=True)
class Projector:
    """A file with an encoder of images, and what it describes. `processor`: keys of preprocessor_config.json."""

    file: GGUFFile
    vision: VisionSpec
    processor: Mapping[str, object]


def read_projector(path: Path, spec: DecoderSpec, text: GGUFFile) -> Projector:
    """Read the metadata of an encoder for a decoder, and its file `text`.

    ModelError names the key or tensor that is missing, wrong or not supported.
    """
    file = GGUFFile(path)
    if (found := file.metadata.get("general.architecture")) != ARCHITECTURE:
        raise file.error(f"general.architecture must be {ARCHITECTURE!r} for an encoder of images, got {found!r:.80}")
    metadata = Metadata(file, ARCHITECTURE)
    is_mixed = not metadata.has("projector_type")
    family = metadata.choice("vision.projector_type" if is_mixed else "projector_type", _FAMILIES)
    if (found := text.metadata.get("general.architecture")) not in _TEXT_MODELS[family]:
        raise file.error(f"is an encoder for {' or '.join(_TEXT_MODELS[family])}, and {text.path} is of {found!r:.80}")
    for key in _CUTTING:
        metadata.reject(key, why="images would be cut, or padded, by it")
    for name in _OTHERS[family]:
        if name in file.tensors:
            raise file.error(f"tensor {name} is not supported yet: LLaVA 1.5 has none")
    config = _config(metadata, family) | {"image_token_id": _image_token(text, family)}
    vision = vision_of(family, ConfigReader(config, str(path)), spec)
    return Projector(file, _with_names(vision, file), _processor(metadata, family))


def _config(metadata: Metadata, family: str) -> dict[str, object]:
    """Return the keys of config.json about an encoder."""
    num_layers = metadata.size("vision.block_count", limit=MAX_LAYERS)
    image_size, patch_size = (metadata.size(f"vision.{name}_size") for name in ("image", "patch"))
    vision: dict[str, object] = {
        "num_hidden_layers": num_layers,
        "hidden_size": metadata.size("vision.embedding_length"),
        "intermediate_size": metadata.size("vision.feed_forward_length"),
        "num_attention_heads": metadata.size("vision.attention.head_count"),
        "layer_norm_eps": metadata.number("vision.attention.layer_norm_epsilon"),
        "image_size": image_size,
        "patch_size": patch_size,
        "num_channels": 3,
    }
    is_gelu = metadata.flag("use_gelu", False)
    metadata.reject("use_silu", False, why=f"a {family} has another activation")
    if family == "gemma3":
        metadata.reject("use_gelu", True, why="a SigLIP has gelu_pytorch_tanh")
        pool = metadata.size("vision.projector.scale_factor", GEMMA3_POOL)
        side = image_size // patch_size // pool
        return {"vision_config": vision, "mm_tokens_per_image": max(side, 1) ** 2}
    vision["hidden_act"] = "gelu" if is_gelu else "quick_gelu"
    return {
        "vision_config": vision,
        "vision_feature_layer": _feature_layer(metadata, num_layers),
        "multimodal_projector_bias": metadata.has_tensor("mm.0.bias"),
    }


def _feature_layer(metadata: Metadata, num_layers: int) -> int:
    """Return how many layers are computed: as a list of one says, or else all of the file."""
    if metadata.raw("vision.feature_layer") is None:
        return num_layers
    found = metadata.file.numbers(f"{ARCHITECTURE}.vision.feature_layer")
    if len(found) != 1 or found[0] not in range(1, num_layers + 1):
        raise metadata.error(f"vision.feature_layer must be a list of one number from 1 to {num_layers}, got "
                             f"{list(found)!r:.80}")
    return int(found[0])


def _image_token(text: GGUFFile, family: str) -> int:
    """Return the token that stands for an image in a prompt: the family's own, or the unknown token.

    Vocabularies of text files often lack the family's. No text of tokenizers with bytes has the unknown token.
    """
    if TOKENS not in text.metadata:
        return 0
    name = _IMAGE_TOKENS[family]
    if (found := text.places(TOKENS, (name,)).get(name)) is not None:
        return found
    unknown = text.metadata.get(_UNKNOWN_TOKEN)
    if not isinstance(unknown, int):
        raise text.error(f"{TOKENS} has no {name}, and there is no {_UNKNOWN_TOKEN} to stand for an image")
    return unknown


def _with_names(vision: VisionSpec, file: GGUFFile) -> VisionSpec:
    """Return the spec with the names of tensors in a file."""
    first = file.tensors.get("v.blk.0.ffn_down.weight")
    names = _WEIGHTS
    if first is not None and first.shape[-1] == vision.tower.hidden_size:
        names = replace(names, feed_forward_in=("ffn_down",), feed_forward_out="ffn_up")
    is_gemma = vision.family == "gemma3"
    return replace(
        vision,
        tower=replace(vision.tower, weights=names),
        patches="patch_embd",
        class_token="class_embd",  # noqa: S106 (no password)
        pre_norm=None if vision.pre_norm is None else "pre_ln",
        projector_norm="soft_emb_norm" if is_gemma else None,
        projector=("input_projection",) if is_gemma else ("0", "2"),
        projector_prefixes=("mm.",),
    )


def _processor(metadata: Metadata, family: str) -> dict[str, object]:
    """Return the settings of a processor of images: those of the family, with what the file says of them."""
    size = metadata.size("vision.image_size")
    edges = {"height": size, "width": size}
    found: dict[str, object] = {"size": edges}
    if family == "llava":
        found = {"size": {"shortest_edge": size}, "crop_size": edges}
    for name in ("image_mean", "image_std"):
        stored = metadata.raw(f"vision.{name}")
        if not isinstance(stored, MetadataArray) or stored.num_items != 3:
            raise metadata.error(f"vision.{name} must be an array of three numbers, got {stored!r:.80}")
        found[name] = list(metadata.file.numbers(f"{ARCHITECTURE}.vision.{name}"))
    return found
