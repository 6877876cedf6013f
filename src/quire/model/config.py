"""Model config: config.json of a folder, checked and turned into a `DecoderSpec`; counts of its weights.

Of generation_config.json only the end-of-sequence tokens are read here;
`quire.engine.requests.generation_config` has the rest.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import ConfigError, ModelError
from quire.core.model_files import read_json_object
from quire.model.architectures import ENCODER_ARCHITECTURES, FAMILIES, MODEL_TYPES, REFUSED
from quire.model.config_reader import CONFIG_FILE, ConfigReader
from quire.model.shapes import (
    DecoderShapes,
    LinearShape,
    NormShape,
    Shape,
    TableShape,
    VectorShape,
    layer_shapes,
    vision_shapes,
)
from quire.model.spec import DecoderSpec, Experts, SpecError, VisionSpec

GENERATION_CONFIG_FILE = "generation_config.json"
EOS_KEY = "eos_token_id"
DTYPES = "float32", "bfloat16", "float16"
FLOAT_BYTES = 4     # float32: pixels, and what is added up
BASE_MODEL, WITH_HEAD = "Model", "ForCausalLM"  # ends of names of architectures


def read_config(folder: Path) -> dict[str, object]:
    """Return the config.json of `folder`: a JSON object of a known architecture with sizes that make sense.

    Raises ModelError with the file and the reason.
    """
    config = read_json_object(folder, CONFIG_FILE)
    spec_from_config(config, str(folder / CONFIG_FILE))
    return config


class UnknownArchitectureError(ModelError):
    """No family of Quire has the architecture that a config names."""


def spec_from_config(config: Mapping[str, object], source: str = CONFIG_FILE) -> DecoderSpec:
    """Return the spec of the architecture that `config` names. `source` is what errors call the config.

    Raises ModelError for an unknown architecture, with the known ones, and for any impossible value.
    """
    reader = ConfigReader(config, source)
    try:
        family, has_head = _family(reader)
        return replace(family(reader), has_head=has_head)
    except SpecError as error:
        raise reader.error(str(error)) from error


def resolved_dtype(asked: str, config: Mapping[str, object], source: str = CONFIG_FILE) -> str:
    """Return the dtype asked for, or the checkpoint's own (key dtype, in older files torch_dtype), or float32."""
    names = {name: name for name in DTYPES}
    if asked != "auto":
        if asked not in names:
            raise ConfigError(f"dtype must be auto, {', '.join(names)}, got {asked!r}")
        return asked
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    return ConfigReader(config, source).choice(key, names, default="float32")


def eos_token_ids(folder: Path, config: Mapping[str, object], vocab_size: int) -> frozenset[int]:
    """Return the ids that end an answer; generation_config.json wins over config.json, and null means none there.

    Raises ModelError for a broken file or for anything but a token id of the model, a list of them or null.
    """
    for name, values in ((GENERATION_CONFIG_FILE, _generation_config(folder)), (CONFIG_FILE, config)):
        value = values.get(EOS_KEY)
        if value is not None:
            return checked_eos_token_ids(value, str(folder / name), vocab_size)
    return frozenset()


def checked_eos_token_ids(value: object, place: str, vocab_size: int) -> frozenset[int]:
    """Return the ids in a value of `EOS_KEY`. Raises ModelError, with `place`, for anything but ids of the model."""
    items = value if isinstance(value, list) else [value]
    return frozenset(_checked(item, place, vocab_size) for item in items)


def _family(config: ConfigReader) -> tuple[Callable[[ConfigReader], DecoderSpec], bool]:
    """Return the family of the architecture that the config names, or of its model type if it names none.

    The second is False for the base model of the architecture, which has no head: `Qwen3Model` of `Qwen3ForCausalLM`.
    """
    named = config.raw("architectures")
    found = named[0] if isinstance(named, list) and named else MODEL_TYPES.get(str(config.raw("model_type")))
    whole = found
    if isinstance(found, str) and found.endswith(BASE_MODEL):
        whole = found.removesuffix(BASE_MODEL) + WITH_HEAD
        if whole in FAMILIES:
            return FAMILIES[whole], False
    if isinstance(found, str) and found in ENCODER_ARCHITECTURES:
        return ENCODER_ARCHITECTURES[found]
    for name in (found, whole):
        if isinstance(name, str) and name in REFUSED:
            raise config.error(f"architecture {found!r} is not supported yet: {REFUSED[name]}")
    if not isinstance(found, str) or found not in FAMILIES:
        what = f"architecture {found!r:.80}" if found is not None else f"model_type {config.raw('model_type')!r:.80}"
        known = ", ".join((*FAMILIES, *ENCODER_ARCHITECTURES))
        raise UnknownArchitectureError(str(config.error(f"unknown {what}; known are {known}")))
    return FAMILIES[found], True


def _generation_config(folder: Path) -> Mapping[str, object]:
    has_file = (folder / GENERATION_CONFIG_FILE).exists()
    return read_json_object(folder, GENERATION_CONFIG_FILE) if has_file else {}


def _checked(value: object, place: str, vocab_size: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise ModelError(f"{place}: {EOS_KEY} must be a token id from 0 to {vocab_size - 1} or a list of them, "
                         f"got {value!r:.80}")
    return value


def num_layer_weights(spec: DecoderSpec) -> int:
    """Return the elements that a token is multiplied with: those of linear layers, without the head."""
    around = DecoderShapes.of(spec)
    shapes = (*_shapes_of_layers(spec), around.project_in, around.project_out, around.layer_projection)
    linear = (shape for shape in shapes if isinstance(shape, LinearShape))
    return int(sum(shape.num_weights * shape.share_of_tokens for shape in linear))


class ExpertReads(NamedTuple):
    """Experts as a step reads them: their number, those of one token, and their share of its `num_weights`."""

    num_experts: int
    num_active: int
    share: float
    num_weights: int  # linear layers and the head: read by a step of one token

    def weights(self, num_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the weights that numbers of tokens read, divided by those of one, if experts are chosen by chance."""
        unused = (1 - self.num_active / self.num_experts) ** num_tokens
        return np.asarray(1 - self.share + self.share * (1 - unused) * self.num_experts / self.num_active)


def expert_reads(spec: DecoderSpec) -> ExpertReads | None:
    """Return the experts of a model, alike in all layers that have them; None if no layer has."""
    mixtures = [each for each in spec.feed_forwards if isinstance(each, Experts)]
    if not mixtures:
        return None
    linear = [shape for shape in _shapes_of_layers(spec) if isinstance(shape, LinearShape)]
    in_experts = sum(shape.num_weights * shape.share_of_tokens for shape in linear if shape.share_of_tokens < 1)
    num_weights = num_layer_weights(spec) + spec.vocab_size * spec.embedding_size
    share = float(in_experts / num_weights)
    return ExpertReads(mixtures[0].num_experts, mixtures[0].num_active, share, num_weights)


def num_parameters(spec: DecoderSpec) -> int:
    """Return the parameters of a model, a tied head counted once."""
    *around, head = DecoderShapes.of(spec)
    num_tied = head.num_weights if spec.is_head_tied else 0
    num_head = num_elements(head) - num_tied if spec.has_head else 0
    vision = () if spec.vision is None else vision_shapes(spec.vision)
    return sum(map(num_elements, (*around, *_shapes_of_layers(spec), *vision))) + num_head


def activation_bytes(spec: VisionSpec, num_tokens: int, itemsize: int) -> int:
    """Return the most bytes that an image of `num_tokens` rows takes while it is encoded, beside weights.

    They are of its pixels and rows, and of its patches in float32 and in the tower's dtype, or of the widest layer with
    its keys and values, whichever is more. itemsize: of the tower's dtype.
    """
    tower, merging = spec.tower, spec.merging
    num_rows = spec.grid**2 + spec.has_class_token if merging is None else num_tokens * spec.pool**2
    num_values = num_rows * spec.num_channels * spec.patch_size**2
    num_frames = 1 if merging is None else merging.num_frames
    patches = num_values * (FLOAT_BYTES + num_frames * (FLOAT_BYTES + itemsize))
    inner = max(each.active_size for each in tower.feed_forwards)
    kept = sum(2 * each.num_kv_heads * each.head_dim for each in tower.attentions[:1])
    layer = num_rows * (2 * tower.hidden_size * FLOAT_BYTES + max(3 * inner, 4 * tower.mixed_width) * itemsize)
    layer += (1 << (num_rows + num_rows // 4).bit_length()) * kept * itemsize     # a power of two of blocks
    joined = 0
    if spec.tiles is not None:          # pixels and rows of all tiles, and what these are scaled to
        size = spec.tiles.size
        num_tiles = max((height // size + 1) * (width // size) for height, width in spec.tiles.sizes)
        joined += num_tiles * (size**2 * spec.num_channels + 3 * spec.grid**2 * spec.hidden_size) * FLOAT_BYTES
    return joined + num_values * FLOAT_BYTES + 2 * num_tokens * spec.row_width * itemsize + max(patches, layer)


def _shapes_of_layers(spec: DecoderSpec) -> list[Shape | None]:
    return [shape for layer in spec.layers for shape in layer_shapes(spec, layer)]


def num_elements(shape: Shape | None) -> int:
    """Return the parameters of a part of a model; 0 for None."""
    if shape is None:
        return 0
    if isinstance(shape, NormShape):
        return sum(map(prod, shape.tensors.values()))
    if isinstance(shape, TableShape):
        return shape.num_rows * shape.width
    if isinstance(shape, VectorShape):
        return shape.length
    return shape.num_weights + (sum(shape.num_rows) if shape.has_bias else 0)
