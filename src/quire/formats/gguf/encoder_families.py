"""Encoders of images of GGUF files, a function for each family: the spec, from the metadata and tensors of a file.

They make keys of config.json, which the families of `quire.model.families` read as a folder's. What files leave out is
that of the published models: windows of Qwen2.5-VL, and the least and most pixels of an image of any size.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from quire.formats.gguf.gguf_file import GGUFFile, Metadata
from quire.model.config_reader import MAX_LAYERS, ConfigReader
from quire.model.families.multimodal import mistral3_vision, pixtral_vision, vision_of
from quire.model.families.qwen_vl import with_qwen2_5_vision, with_qwen2_vision, with_qwen3_vision
from quire.model.spec import DecoderSpec, VisionSpec

GEMMA3_POOL = 4
PATCH_MERGER = "mm.patch_merger.weight"
QWEN_WINDOW = 112         # pixels
QWEN_MERGE = 2            # patches in a row, and in a column, that become one row
QWEN_FRAMES = 2           # frames of a patch
MOST_TOKENS = 16_384      # most tokens of an image of a Qwen-VL
NUM_SECTIONS = 4          # sections of rotary pairs: time, row, column, and one that no model has


class TextModel(NamedTuple):
    """The text model beside an encoder, its file, and its token for images."""

    spec: DecoderSpec
    file: GGUFFile
    image_token_id: int


class Family(NamedTuple):
    """Encoders with one `clip.projector_type`.

    texts: `general.architecture` of their text models. image_token: the token for images in prompts. projector, norm:
    its modules, and the one before it. processor: keys of preprocessor_config.json beside mean and deviation.
    is_permuted: heads of queries and keys are stored as those of a Llama.
    """

    texts: tuple[str, ...]
    image_token: str
    projector: tuple[str, ...]
    to_vision: Callable[[Metadata, TextModel], VisionSpec]
    processor: Callable[[Metadata, VisionSpec], Mapping[str, object]]
    norm: str | None = None
    is_permuted: bool = False


def _sizes(metadata: Metadata) -> dict[str, object]:
    """Return the keys of an encoder that most families have."""
    return {
        "num_hidden_layers": metadata.size("vision.block_count", limit=MAX_LAYERS),
        "hidden_size": metadata.size("vision.embedding_length"),
        "intermediate_size": metadata.size("vision.feed_forward_length"),
        "num_attention_heads": metadata.size("vision.attention.head_count"),
        "layer_norm_eps": metadata.number("vision.attention.layer_norm_epsilon"),
        "image_size": metadata.size("vision.image_size"),
        "patch_size": metadata.size("vision.patch_size"),
        "num_channels": 3,
    }


def _activation(metadata: Metadata) -> str:
    """Return the activation of a feed-forward, by config.json's names."""
    is_gelu, is_silu = (metadata.flag(f"use_{name}", False) for name in ("gelu", "silu"))
    if is_gelu and is_silu:
        raise metadata.error("use_gelu and use_silu are both true")
    return "gelu" if is_gelu else "silu" if is_silu else "quick_gelu"


# --- LLaVA 1.5 and Gemma 3 --------------------------------------------------------------------------------------------


def _llava(metadata: Metadata, text: TextModel) -> VisionSpec:
    """Return the encoder of a LLaVA 1.5."""
    for name in ("mm.1.weight", "mm.3.weight", "mm.4.weight", "v.post_ln.weight", "v.patch_embd.bias"):
        if metadata.has_tensor(name):
            raise metadata.file.error(f"tensor {name} is not supported yet: LLaVA 1.5 has none")
    metadata.reject("use_silu", False, why="a llava has another activation")
    sizes = _sizes(metadata)
    config = {
        "vision_config": sizes | {"hidden_act": _activation(metadata)},
        "vision_feature_layer": _feature_layer(metadata, int(str(sizes["num_hidden_layers"]))),
        "multimodal_projector_bias": metadata.has_tensor("mm.0.bias"),
        "image_token_id": text.image_token_id,
    }
    return vision_of("llava", _reader(metadata, config), text.spec)


def _feature_layer(metadata: Metadata, num_layers: int) -> int:
    """Return how many layers are computed: as a list of one says, or else all of the file."""
    if metadata.raw("vision.feature_layer") is None:
        return num_layers
    found = metadata.file.numbers("clip.vision.feature_layer")
    if len(found) != 1 or found[0] not in range(1, num_layers + 1):
        raise metadata.error(f"vision.feature_layer must be a list of one number from 1 to {num_layers}, got "
                             f"{list(found)!r:.80}")
    return int(found[0])


def _gemma3(metadata: Metadata, text: TextModel) -> VisionSpec:
    """Return the encoder of a Gemma 3."""
    metadata.reject("use_silu", False, why="a gemma3 has another activation")
    metadata.reject("use_gelu", True, why="a SigLIP has gelu_pytorch_tanh")
    sizes = _sizes(metadata)
    pool = metadata.size("vision.projector.scale_factor", GEMMA3_POOL)
    side = int(str(sizes["image_size"])) // int(str(sizes["patch_size"])) // pool
    config = {
        "vision_config": sizes, "mm_tokens_per_image": max(side, 1) ** 2, "image_token_id": text.image_token_id,
    }  # fmt: skip
    return vision_of("gemma3", _reader(metadata, config), text.spec)


def _cropped(metadata: Metadata, vision: VisionSpec) -> Mapping[str, object]:
    size = metadata.size("vision.image_size")
    return {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}}


def _square(metadata: Metadata, vision: VisionSpec) -> Mapping[str, object]:
    size = metadata.size("vision.image_size")
    return {"size": {"height": size, "width": size}}


# --- Qwen-VL ----------------------------------------------------------------------------------------------------------


def _qwen2(metadata: Metadata, text: TextModel) -> VisionSpec:
    """Return the encoder of a Qwen2-VL. The size of its feed-forward is wrong in files: the tensor has it."""
    own = _qwen_sizes(metadata)
    width = int(str(own["hidden_size"]))
    name = "v.blk.0.ffn_down.weight"
    if not metadata.has_tensor(name):
        raise metadata.file.error(f"tensor {name} is missing")
    ratio = math.prod(metadata.file.tensors[name].shape) // width // width
    own |= {"embed_dim": width, "hidden_size": own["out_hidden_size"], "mlp_ratio": ratio}
    return _qwen(metadata, text, own | {"hidden_act": _activation(metadata)}, with_qwen2_vision)


def _qwen2_5(metadata: Metadata, text: TextModel) -> VisionSpec:
    """Return the encoder of a Qwen2.5-VL: every n-th layer has no windows."""
    own = _qwen_sizes(metadata)
    num_layers = int(str(own["depth"]))
    every = metadata.size("vision.n_wa_pattern", limit=num_layers)
    own |= {
        "intermediate_size": metadata.size("vision.feed_forward_length"),
        "hidden_act": _activation(metadata),
        "window_size": metadata.size("vision.window_size", QWEN_WINDOW),
        "fullatt_block_indexes": list(range(every - 1, num_layers, every)),
    }
    return _qwen(metadata, text, own, with_qwen2_5_vision)


def _qwen3(metadata: Metadata, text: TextModel) -> VisionSpec:
    """Return the encoder of a Qwen3-VL or Qwen3.5: the text model adds outputs of as many layers as the file marks."""
    own = _qwen_sizes(metadata)
    num_layers, architecture = int(str(own["depth"])), text.file.metadata["general.architecture"]
    marks, name = list[int](), "vision.is_deepstack_layers"
    if metadata.has(name):
        marks = metadata.counts(name, num_layers)
    deep, key = [index for index, each in enumerate(marks) if each], f"{architecture}.n_deepstack_layers"
    if len(deep) != (expected := text.file.metadata.get(key, 0)):
        raise metadata.error(f"{name} marks {len(deep)} layers, and {text.file.path} has {key} = {expected!r:.80}")
    metadata.reject("use_gelu", True, why="the encoder of a Qwen3-VL has gelu_pytorch_tanh")
    metadata.reject("use_silu", False, why="the encoder of a Qwen3-VL has gelu_pytorch_tanh")
    own |= {
        "intermediate_size": metadata.size("vision.feed_forward_length"),
        "num_position_embeddings": metadata.rows("v.position_embd.weight"),
        "deepstack_visual_indexes": deep,
    }
    return _qwen(metadata, text, own, with_qwen3_vision)


def _qwen_sizes(metadata: Metadata) -> dict[str, object]:
    """Return the keys of the encoder that all Qwen-VL have. Norms add 1e-6: files have the text model's number."""
    return {
        "depth": metadata.size("vision.block_count", limit=MAX_LAYERS),
        "hidden_size": metadata.size("vision.embedding_length"),
        "num_heads": metadata.size("vision.attention.head_count"),
        "patch_size": metadata.size("vision.patch_size"),
        "spatial_merge_size": metadata.size("vision.spatial_merge_size", QWEN_MERGE),
        "temporal_patch_size": QWEN_FRAMES,
        "out_hidden_size": metadata.size("vision.projection_dim"),
    }


def _qwen(
    metadata: Metadata, text: TextModel, own: dict[str, object],
    attached: Callable[[ConfigReader, ConfigReader, DecoderSpec], DecoderSpec],
) -> VisionSpec:  # fmt: skip
    """Return the encoder that `attached` makes of its keys and of the text model's sections of rotary pairs."""
    key = f"{text.file.metadata['general.architecture']}.rope.dimension_sections"
    sections = text.file.numbers(key)
    if len(sections) != NUM_SECTIONS or sections[-1]:
        raise text.file.error(f"{key} must be {NUM_SECTIONS} numbers, the last of them 0, got {list(sections)!r:.80}")
    rope = {"rope_parameters": {"mrope_section": list(sections[:-1])}}
    config = {"vision_config": own, "image_token_id": text.image_token_id}
    spec = attached(_reader(metadata, config), ConfigReader(rope, str(text.file.path)), text.spec)
    assert spec.vision is not None
    return spec.vision


def _any_size(metadata: Metadata, vision: VisionSpec, least_tokens: int = 4) -> Mapping[str, object]:
    """Return the limits of an image's pixels: the file's, or those of published folders."""
    area = vision.unit**2
    return {
        "patch_size": vision.patch_size, "temporal_patch_size": QWEN_FRAMES, "merge_size": vision.pool,
        "min_pixels": metadata.size("vision.image_min_pixels", least_tokens * area, limit=2**28),
        "max_pixels": metadata.size("vision.image_max_pixels", MOST_TOKENS * area, limit=2**28),
    }  # fmt: skip


def _any_size_3(metadata: Metadata, vision: VisionSpec) -> Mapping[str, object]:
    return _any_size(metadata, vision, least_tokens=64)


# --- Pixtral ----------------------------------------------------------------------------------------------------------


def _pixtral(metadata: Metadata, text: TextModel) -> VisionSpec:
    """Return the encoder of a Pixtral, or, if a layer joins squares of patches, of a Mistral 3."""
    own = _sizes(metadata) | {
        "hidden_act": _activation(metadata), "rope_theta": metadata.number("rope.freq_base", 10_000.0),
    }  # fmt: skip
    config = _reader(metadata, {
        "image_token_id": text.image_token_id,
        "spatial_merge_size": metadata.size("vision.spatial_merge_size", 1),
        "multimodal_projector_bias": metadata.has_tensor("mm.1.bias"),
    })  # fmt: skip
    tower = config.nested("vision_config", own)
    if metadata.has_tensor(PATCH_MERGER):
        return mistral3_vision(config, tower, text.spec, text.spec.norm_eps)
    metadata.reject("vision.spatial_merge_size", 1, why=f"there is no tensor {PATCH_MERGER}")
    return pixtral_vision(config, tower, text.spec)


def _bounded(metadata: Metadata, vision: VisionSpec) -> Mapping[str, object]:
    return {"size": {"longest_edge": metadata.size("vision.image_size")}, "patch_size": vision.patch_size}


def _reader(metadata: Metadata, config: Mapping[str, object]) -> ConfigReader:
    return ConfigReader(config, str(metadata.file.path))


_QWEN_PROJECTOR = "mm.0", "mm.2"
FAMILIES = {  # clip.projector_type -> family
    "mlp": Family(("llama", "qwen2"), "<image>", ("mm.0", "mm.2"), _llava, _cropped),
    "gemma3": Family(
        ("gemma3",), "<image_soft_token>", ("mm.input_projection",), _gemma3, _square, norm="mm.soft_emb_norm"
    ),
    "qwen2vl_merger": Family(("qwen2vl",), "<|image_pad|>", _QWEN_PROJECTOR, _qwen2, _any_size, norm="v.post_ln"),
    "qwen2.5vl_merger": Family(("qwen2vl",), "<|image_pad|>", _QWEN_PROJECTOR, _qwen2_5, _any_size, norm="v.post_ln"),
    "qwen3vl_merger": Family(
        ("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"), "<|image_pad|>", _QWEN_PROJECTOR, _qwen3, _any_size_3,
        norm="v.post_ln",
    ),
    "pixtral": Family(
        ("llama", "mistral3"), "[IMG]", ("mm.1", "mm.2"), _pixtral, _bounded, norm="mm.input_norm", is_permuted=True
    ),
}  # fmt: skip
