"""Model source of random weights: a folder's config.json alone, whether or not it has weights. Loads no torch."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.core.errors import ModelError
from quire.model.config import read_config, spec_from_config
from quire.model.config_reader import CONFIG_FILE
from quire.model.quantization import Quantization
from quire.model.source import FolderSource, is_quantized

if TYPE_CHECKING:
    from quire.model.weight_formats.weight_format import StoredTensors

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DummySource(FolderSource):
    """A `ModelSource` with random weights."""

    def open_tensors(self, quantization: Quantization) -> "StoredTensors":
        """Return random tensors of the config's shapes, which are quantized like those of a checkpoint of floats."""
        from quire.model.dummy_weights.dummy_checkpoint import DummyCheckpoint  # noqa: PLC0415 (for engines alone)
        from quire.model.weight_formats.float_formats import tensors_of_floats  # noqa: PLC0415

        return tensors_of_floats(DummyCheckpoint(self.spec), quantization)


def read_dummy(path: Path) -> DummySource:
    """Read the config of a folder, and log that its answers will mean nothing.

    Raises ModelError for a GGUF file and for a config of quantized weights: what random numbers stand for there depends
    on the format, which floats of the same shapes are not.
    """
    if path.is_file():
        raise ModelError(f"{path}: load_format 'dummy' needs a folder with {CONFIG_FILE}, and this is a GGUF file")
    config, place = read_config(path), str(path / CONFIG_FILE)
    if is_quantized(config):
        raise ModelError(
            f"{place}: load_format 'dummy' makes floating-point weights, and the config is of quantized ones; take "
            "the config of the float model, and quantization int8 or int4"
        )
    source = DummySource(path, config, place, spec_from_config(config, place))
    log.warning("load_format dummy: the weights of %s are random numbers, and answers mean nothing", path)
    return source
