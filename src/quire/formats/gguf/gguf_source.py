"""Model source of a GGUF file, and its tokenizer. Loads no torch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quire.core.errors import ModelError
from quire.formats.gguf.gguf_config import (
    gguf_eos_token_ids,
    permuted_tensors,
    raised_tensors,
    read_gguf_config,
    with_gguf_weights,
    with_single_experts,
)
from quire.formats.gguf.gguf_file import GGUFFile
from quire.formats.gguf.gguf_projector import ROW_END, Projector, read_projector
from quire.formats.gguf.gguf_weights import TwoFiles, gguf_quantization, open_gguf
from quire.model.config import resolved_dtype, spec_from_config
from quire.model.quantization import Quantization, QuantizationOptions
from quire.model.spec import DecoderSpec
from quire.model.weight_format import StoredTensors
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class GGUFSource:
    """A `ModelSource` of a file. `config` has the keys of config.json. `projector`: of images, in its own file."""

    file: GGUFFile
    config: dict[str, object]
    spec: DecoderSpec
    projector: Projector | None = None

    @property
    def path(self) -> Path:
        return self.file.path

    def dtype(self, asked: str = "auto") -> str:
        """Return the dtype asked for, or that of most of the file's elements."""
        return resolved_dtype(asked, self.config, str(self.path))

    def quantization(self, asked: QuantizationOptions) -> Quantization:
        """Return the quantization of the file; one of floats may be quantized while it is loaded."""
        return gguf_quantization(self.file, self.spec, asked)

    def eos_token_ids(self) -> frozenset[int]:
        """Return the ids that the metadata names, and those of tokens that are known to end an answer."""
        return gguf_eos_token_ids(self.file, self.spec.vocab_size)

    def open_tensors(self, quantization: Quantization) -> StoredTensors:
        """Return the tensors of the file, and of that of the encoder of images."""
        permuted, raised = permuted_tensors(self.spec, self.file), raised_tensors(self.file)
        stored = open_gguf(self.file, permuted, raised, self.spec.weights.embedding, quantization)
        if self.projector is None:
            return stored
        return stored._replace(checkpoint=TwoFiles(stored.checkpoint, self.projector.checkpoint))

    def image_processor(self) -> tuple[str, Mapping[str, object]]:
        """Return the settings of the processor of images that the encoder's file describes."""
        if self.projector is None:
            raise ModelError(f"{self.path}: images need the file of an encoder (mmproj)")
        return str(self.projector.file.path), self.projector.processor


def read_gguf(path: Path, projector: Path | None = None) -> GGUFSource:
    """Read the metadata of a file, and that of the file of an encoder of images.

    ModelError names the key or tensor that is missing, wrong or not supported.
    """
    file = GGUFFile(path)
    file.tensors = with_single_experts(file)
    config = read_gguf_config(file)
    spec = with_gguf_weights(spec_from_config(config, str(path)), file)
    if projector is None:
        return GGUFSource(file, config, spec)
    found = read_projector(projector, spec, file)
    return GGUFSource(file, config, replace(spec, vision=found.vision), found)


def gguf_tokenizer_loader(path: Path) -> Callable[[], Tokenizer] | None:
    """Return what loads the tokenizer of a file, or None if it has none. ModelError for a file that is broken."""
    from quire.formats.gguf.gguf_tokenizer import has_gguf_tokenizer, read_gguf_tokenizer  # noqa: PLC0415

    file = GGUFFile(path)
    if not has_gguf_tokenizer(file):
        return None
    return lambda: Tokenizer.load(str(path), lambda: read_gguf_tokenizer(file))


def num_elements(path: Path) -> int:
    """Return the elements of all tensors of a file that are a model's. ModelError for a file that is none."""
    return sum(math.prod(entry.shape) for name, entry in GGUFFile(path).tensors.items() if name != ROW_END)
