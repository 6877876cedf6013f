"""Model source: a folder in Hugging Face format or a GGUF file, its config read and checked. Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.core.gguf import GGUFFile, is_gguf
from quire.model.config import dtype_name, eos_token_ids, read_config, spec_from_config
from quire.model.config_reader import CONFIG_FILE
from quire.model.gguf_config import gguf_eos_token_ids, read_gguf_config, with_gguf_weights
from quire.model.gguf_quantization import gguf_quantization
from quire.model.quantization import Quantization, QuantizationOptions, resolve
from quire.model.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on disk. `config` has the keys of config.json; `config_place` is what errors call it."""

    path: Path
    config: Mapping[str, object]
    config_place: str
    spec: DecoderSpec
    gguf: GGUFFile | None = None

    def dtype(self, asked: str = "auto") -> str:
        """Return the name of the dtype asked for, or of the model's own. ConfigError, ModelError as `dtype_name`."""
        return dtype_name(asked, self.config, self.config_place)

    def quantization(self, asked: QuantizationOptions) -> Quantization:
        """Return the quantization of the model. ConfigError for options that contradict it."""
        if self.gguf is not None:
            return gguf_quantization(self.gguf, self.spec, asked, self.config)
        return resolve(asked, self.config, self.config_place)

    def eos_token_ids(self) -> frozenset[int]:
        """Return the ids that end an answer. ModelError for anything but ids of the vocabulary."""
        if self.gguf is not None:
            return gguf_eos_token_ids(self.gguf, self.spec.vocab_size)
        return eos_token_ids(self.path, self.config, self.spec.vocab_size)


def read_source(path: Path) -> ModelSource:
    """Read the config of the folder or file that `resolve_model` has found.

    Raises ModelError for a folder or file that is no model of a known family, and names what is wrong.
    """
    return _read_file(path) if is_gguf(path) else _read_folder(path)


def _read_folder(folder: Path) -> ModelSource:
    config, place = read_config(folder), str(folder / CONFIG_FILE)
    return ModelSource(folder, config, place, spec_from_config(config, place))


def _read_file(path: Path) -> ModelSource:
    file = GGUFFile(path)
    config = read_gguf_config(file)
    return ModelSource(path, config, str(path), with_gguf_weights(spec_from_config(config, str(path)), file), file)
