"""Encoder of images in a GGUF file of its own, which llama.cpp calls mmproj, beside the file of a text model.

Files of LLaVA 1.5 are an older converter's: `block_count` is that of the layers that are used, which leaves out the
last one, `clip.vision.projection_dim` is CLIP's own, and the first layer of a feed-forward is called `ffn_down`, the
second `ffn_up`. In Gemma 3's files the norm before the projector is stored plus 1. A patch of two frames is two
tensors in those of Qwen-VL. No file has a token for images.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quire.core.arrays import Array
from quire.formats.gguf.encoder_families import FAMILIES, PATCH_MERGER, Family, TextModel
from quire.formats.gguf.gguf_config import TOKENS
from quire.formats.gguf.gguf_file import GGUFFile, Metadata, MetadataArray
from quire.formats.gguf.gguf_weights import GGUFCheckpoint
from quire.model.spec import DecoderSpec, FeedForward, VisionSpec, WeightMap

ARCHITECTURE = "clip"
RAISED = frozenset(("mm.soft_emb_norm.weight",))  # stored plus 1
PATCHES, SECOND_FRAME = "v.patch_embd.weight", "v.patch_embd.weight.1"
ROW_END = "v.token_embd.img_break"  # the embedding that the text model has, too
_UNKNOWN_TOKEN = "tokenizer.ggml.unknown_token_id"  # noqa: S105 (no password)
_CUTTING = ("vision.image_grid_pinpoints", "vision.image_aspect_ratio", "vision.mm_patch_merge_type")
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


class EncoderCheckpoint(GGUFCheckpoint):
    """A `Checkpoint` of an encoder. The two frames of a patch are one tensor, [out, channels, 2, rows, columns].

    ModelError if they are not alike.
    """

    def __init__(self, file: GGUFFile, permuted: Mapping[str, int]) -> None:
        super().__init__(file, permuted, RAISED)
        self._has_frames = SECOND_FRAME in file.tensors
        if not self._has_frames or PATCHES not in file.tensors:
            return
        first, second = (file.tensors[name] for name in (PATCHES, SECOND_FRAME))
        if (first.type, first.shape) != (second.type, second.shape):
            frames = (f"{each.type.name} of shape {list(each.shape)}" for each in (second, first))
            raise file.error(f"tensor {SECOND_FRAME} is {', and the first frame '.join(frames)}")

    @property
    def names(self) -> Collection[str]:
        return [name for name in super().names if name not in (SECOND_FRAME, ROW_END)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        shape = super().shape(name)
        return (*shape[:2], 2, *shape[2:]) if name == PATCHES and self._has_frames else shape

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return rows [start, stop) of a tensor."""
        found = super().read(name, start, stop)
        if name != PATCHES or not self._has_frames:
            return found
        return np.stack([found, super().read(SECOND_FRAME, start, stop)], axis=2)


@dataclass(frozen=True, slots=True)
class Projector:
    """A file with an encoder of images, and what it describes. `processor`: keys of preprocessor_config.json."""

    file: GGUFFile
    vision: VisionSpec
    processor: Mapping[str, object]
    checkpoint: EncoderCheckpoint


def read_projector(path: Path, spec: DecoderSpec, text: GGUFFile) -> Projector:
    """Read the metadata of an encoder for a decoder, and its file `text`.

    ModelError names the key or tensor that is missing, wrong or not supported.
    """
    file = GGUFFile(path)
    if (found := file.metadata.get("general.architecture")) != ARCHITECTURE:
        raise file.error(f"general.architecture must be {ARCHITECTURE!r} for an encoder of images, got {found!r:.80}")
    metadata = Metadata(file, ARCHITECTURE)
    is_mixed = not metadata.has("projector_type")
    family = metadata.choice("vision.projector_type" if is_mixed else "projector_type", FAMILIES)
    if (found := text.metadata.get("general.architecture")) not in family.texts:
        raise file.error(f"is an encoder for {' or '.join(family.texts)}, and {text.path} is of {found!r:.80}")
    for key in _CUTTING:
        metadata.reject(key, why="images would be cut, or padded, by it")
    token_id = _image_token(text, family.image_token)
    vision = family.to_vision(metadata, TextModel(spec, text, token_id))
    if vision.merging is not None and vision.merging.num_frames > 1 and SECOND_FRAME not in file.tensors:
        raise file.error(f"tensor {SECOND_FRAME} is missing")
    processor = {**family.processor(metadata, vision), **_normalization(metadata)}
    checkpoint = EncoderCheckpoint(file, _permuted(file, vision) if family.is_permuted else {})
    return Projector(file, _with_names(vision, family, file), processor, checkpoint)


def _image_token(text: GGUFFile, name: str) -> int:
    """Return the token that stands for an image in a prompt: the family's own, or the unknown token.

    Vocabularies of text files often lack the family's. No text of tokenizers with bytes has the unknown token.
    """
    if TOKENS not in text.metadata:
        return 0
    if (found := text.places(TOKENS, (name,)).get(name)) is not None:
        return found
    unknown = text.metadata.get(_UNKNOWN_TOKEN)
    if not isinstance(unknown, int):
        raise text.error(f"{TOKENS} has no {name}, and there is no {_UNKNOWN_TOKEN} to stand for an image")
    return unknown


def _permuted(file: GGUFFile, vision: VisionSpec) -> dict[str, int]:
    """Return the tensors with heads that are stored in another order, and the dimensions of a head of each."""
    names = (f"v.blk.{layer}.attn_{part}.weight" for layer in range(vision.tower.num_layers) for part in "qk")
    return {name: vision.tower.head_dim for name in names if name in file.tensors}


def _with_names(vision: VisionSpec, family: Family, file: GGUFFile) -> VisionSpec:
    """Return the spec with the names of tensors in a file."""
    first, width = file.tensors.get("v.blk.0.ffn_down.weight"), vision.tower.hidden_size
    is_swapped = first is not None and first.shape[-1] == width and first.shape[0] != width
    up, down = ("ffn_down", "ffn_up") if is_swapped else ("ffn_up", "ffn_down")
    feed_forward = vision.tower.layers[0].feed_forward
    gate = ("ffn_gate",) if isinstance(feed_forward, FeedForward) and feed_forward.is_gated else ()
    names = replace(_WEIGHTS, feed_forward_in=(*gate, up), feed_forward_out=down)
    if "v.blk.0.attn_qkv.weight" in file.tensors:
        names = replace(names, qkv=("attn_qkv",))
    merging = None if vision.merging is None else replace(
        vision.merging,
        deep_norm="v.deepstack.{layer}.norm",
        deep_projector=("v.deepstack.{layer}.fc1", "v.deepstack.{layer}.fc2"),
        merger=None if vision.merging.merger is None else PATCH_MERGER.removesuffix(".weight"),
    )  # fmt: skip
    return replace(
        vision,
        tower=replace(vision.tower, weights=names),
        patches="patch_embd",
        class_token="class_embd",  # noqa: S106 (no password)
        pre_norm=None if vision.pre_norm is None else "pre_ln",
        projector_norm=None if vision.projector_norm is None else family.norm,
        projector=family.projector,
        projector_prefixes=("",),
        merging=merging,
    )


def _normalization(metadata: Metadata) -> dict[str, object]:
    """Return the mean and deviation that a processor of images computes with."""
    found: dict[str, object] = {}
    for name in ("image_mean", "image_std"):
        stored = metadata.raw(f"vision.{name}")
        if not isinstance(stored, MetadataArray) or stored.num_items != 3:
            raise metadata.error(f"vision.{name} must be an array of three numbers, got {stored!r:.80}")
        found[name] = list(metadata.file.numbers(f"{ARCHITECTURE}.vision.{name}"))
    return found
