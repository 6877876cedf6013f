"""Model source of a folder with quantized weights. Loads no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.formats.quantized.folder_quantization import FolderQuantization, folder_quantization
from quire.formats.quantized.method_configs import quantization_from_config
from quire.formats.quantized.schemes import StoredQuantization
from quire.model.config import read_config, spec_from_config
from quire.model.config_reader import CONFIG_FILE
from quire.model.quantization import Quantization, QuantizationOptions
from quire.model.source import FolderSource

if TYPE_CHECKING:
    from quire.model.weight_formats.weight_format import StoredTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedSource(FolderSource):
    """A `ModelSource` of a folder with quantized weights."""

    stored: StoredQuantization

    def quantization(self, asked: QuantizationOptions) -> FolderQuantization:
        """Return the quantization of the folder."""
        return folder_quantization(asked, self.stored, self.config_place)

    def open_tensors(self, quantization: Quantization) -> "StoredTensors":
        """Return the tensors of the safetensors files."""
        from quire.formats.quantized.quantized_weights import open_quantized  # noqa: PLC0415 (for engines alone)

        assert isinstance(quantization, FolderQuantization)
        return open_quantized(self.path, quantization)


def read_quantized(path: Path) -> QuantizedSource:
    """Read the config of a folder with quantized weights. ModelError for one that is not supported names the option."""
    config, place = read_config(path), str(path / CONFIG_FILE)
    stored = quantization_from_config(config, place)
    assert stored is not None, "the caller has looked"
    return QuantizedSource(path, config, place, spec_from_config(config, place), stored=stored)
