"""Model source: a model on disk, its config read and checked. Here, a folder of floats in Hugging Face format.

Sources of other formats are in `quire.formats`.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quire.core.errors import ModelError
from quire.core.image_processing import (
    ImageSettings,
    PixelLimits,
    image_settings,
    read_processor,
    settings_of_any_size,
    settings_of_bounded_size,
    settings_of_tiles,
)
from quire.model.config import eos_token_ids, read_config, resolved_dtype, spec_from_config
from quire.model.config_reader import CONFIG_FILE
from quire.model.quantization import CONFIG_KEYS, Quantization, QuantizationOptions, resolve
from quire.model.spec import DecoderSpec, VisionSpec

if TYPE_CHECKING:
    from quire.model.weight_format import StoredTensors

log = logging.getLogger(__name__)


class ModelSource(Protocol):
    """A model on disk."""

    @property
    def path(self) -> Path:
        """Folder or file."""

    @property
    def spec(self) -> DecoderSpec:
        """Spec that the config describes."""

    def dtype(self, asked: str = "auto") -> str:
        """Return the name of the dtype asked for, or of the model's own. ConfigError, ModelError: `resolved_dtype`."""

    def quantization(self, asked: QuantizationOptions) -> Quantization:
        """Return the quantization of the model. ConfigError for options that contradict it."""

    def eos_token_ids(self) -> frozenset[int]:
        """Return the ids that end an answer. ModelError for anything but ids of the vocabulary."""

    def open_tensors(self, quantization: Quantization) -> "StoredTensors":
        """Return the tensors, and the format of linear weights; no weight is read yet.

        quantization: as `quantization` returned it. Raises ModelError for files that are broken.
        """

    def image_processor(self) -> tuple[str, Mapping[str, object]]:
        """Return the file with the settings of the model's processor of images, and them. ModelError for none."""


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A `ModelSource` of a folder. `config`: its config.json, `config_place`: what errors call that."""

    path: Path
    config: Mapping[str, object]
    config_place: str
    spec: DecoderSpec

    def dtype(self, asked: str = "auto") -> str:
        """Return the dtype asked for, or the folder's own."""
        return resolved_dtype(asked, self.config, self.config_place)

    def quantization(self, asked: QuantizationOptions) -> Quantization:
        """Return the quantization that is asked for: weights are rounded while they are read."""
        return resolve(asked, self.config_place)

    def eos_token_ids(self) -> frozenset[int]:
        """Return the ids of generation_config.json or config.json."""
        return eos_token_ids(self.path, self.config, self.spec.vocab_size)

    def open_tensors(self, quantization: Quantization) -> "StoredTensors":
        """Return the tensors of the safetensors files."""
        from quire.model.checkpoints.safetensors import SafetensorsCheckpoint  # noqa: PLC0415 (for engines alone)
        from quire.model.weight_format import tensors_of_floats  # noqa: PLC0415

        return tensors_of_floats(SafetensorsCheckpoint(self.path), quantization)

    def image_processor(self) -> tuple[str, Mapping[str, object]]:
        """Return the settings of processor_config.json or preprocessor_config.json."""
        return read_processor(self.path)


def read_folder(path: Path) -> FolderSource:
    """Read the config of a folder with floating-point weights.

    Raises ModelError for a folder that is no model of a known family, or has quantized weights; it names what is wrong.
    """
    config, place = read_config(path), str(path / CONFIG_FILE)
    if is_quantized(config):
        raise ModelError(f"{place}: weights are quantized, and only floating-point weights are read here")
    return FolderSource(path, config, place, spec_from_config(config, place))


def image_settings_of(
    source: ModelSource, vision: VisionSpec, limits: PixelLimits
) -> ImageSettings | None:
    """Return the settings of a model's image processor; None, and a line in the log, if its files have none."""
    sizes: dict[str, Any] = {"image_token_id": vision.image_token_id, "patch_size": vision.patch_size}
    try:
        given = *source.image_processor(), vision.family
        if (tiles := vision.tiles) is not None:
            return settings_of_tiles(*given, **sizes, size=tiles.size, sizes=tiles.sizes, most_tiles=tiles.most)
        sizes["pool"] = vision.pool
        if vision.has_row_ends:
            return settings_of_bounded_size(*given, **sizes)
        if vision.merging is not None:
            return settings_of_any_size(*given, **sizes, num_frames=vision.merging.num_frames, limits=limits)
        num_extra = int(vision.keeps_class_token)
        return image_settings(*given, **sizes, image_size=vision.image_size, num_extra=num_extra)
    except ModelError as error:
        log.warning("images of requests are refused: %s", error)
        return None


def is_quantized(config: Mapping[str, object]) -> bool:
    """Return whether a config.json says that weights are quantized."""
    return any(config.get(key) is not None for key in CONFIG_KEYS)
