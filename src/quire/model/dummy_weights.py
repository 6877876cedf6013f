"""Random weights of a config's shapes, for measurements: the model source, and its checkpoint. Loads no torch.

All tensors are pieces of one periodic sequence of numbers, from a place that their name gives: 7 billion numbers take
seconds, whatever rows of a tensor are read they are the same, and no more memory is needed than for the rows. The
period is a prime, so that the rows of a tensor differ.
"""

import logging
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire.core.arrays import FLOAT32, Array
from quire.core.errors import ModelError
from quire.model.config import read_config, spec_from_config
from quire.model.config_reader import CONFIG_FILE
from quire.model.quantization import Quantization
from quire.model.shapes import (
    DecoderShapes,
    LinearShape,
    NormShape,
    Shape,
    VectorShape,
    VisionShapes,
    layer_shapes,
    shapes_around,
)
from quire.model.source import FolderSource, is_quantized
from quire.model.spec import DecoderSpec, VisionSpec

if TYPE_CHECKING:
    from quire.model.weight_format import StoredTensors




log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DummySource(FolderSource):
    """A `ModelSource` with random weights."""

    def open_tensors(self, quantization: Quantization) -> "StoredTensors":
        """Return random tensors of the config's shapes, which are quantized like those of a checkpoint of floats."""
        from quire.model.weight_format import tensors_of_floats  # noqa: PLC0415

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


PERIOD = (1 << 22) - 3  # a prime; 16 MiB
PIECE = 1 << 14         # numbers made at once: their float64 forms stay in a CPU's cache
_WIDEST = float(np.float32(3**0.5))  # bound of uniform numbers with variance 1
_FRACTION = (1 << 24) - 1


class _Entry(NamedTuple):
    shape: tuple[int, ...]
    is_ones: bool = False


class DummyCheckpoint:
    """A `Checkpoint` of a spec's tensors, as a folder in Hugging Face format has them; a tied head has none.

    Numbers are uniform, of mean 0 and variance 1 / (the last dimension), so that products of unit scale remain of unit
    scale; weights of norms are 1. They depend on names and shapes alone.
    """

    def __init__(self, spec: DecoderSpec) -> None:
        self._entries = dict(_entries(spec))
        self._numbers, random = np.empty(PERIOD, np.float32), np.random.RandomState(0)
        for start in range(0, PERIOD, PIECE):
            piece = self._numbers[start : start + PIECE]
            numbers = random.randint(0, 1 << 32, len(piece), dtype=np.uint32) & _FRACTION
            piece[:] = numbers * ((2 * _WIDEST) / (_FRACTION + 1)) - _WIDEST

    @property
    def names(self) -> Collection[str]:
        return self._entries.keys()

    def location(self, name: str | None = None) -> str:
        """Return what errors call a tensor's place."""
        return "random weights"

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """Return the dtype of all tensors."""
        return "F32"

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return rows [start, stop) of a tensor."""
        shape, is_ones = self._entries[name]
        rows = np.empty((stop - start, *shape[1:]), FLOAT32)
        if is_ones:
            rows.fill(1)
            return rows
        flat, num_made, scale = rows.reshape(-1), 0, np.float32(shape[-1] ** -0.5)
        place = zlib.crc32(name.encode()) + start * prod(shape[1:])
        while num_made < len(flat):
            piece = self._numbers[(place + num_made) % PERIOD :][: len(flat) - num_made]
            np.multiply(piece, scale, out=flat[num_made : num_made + len(piece)])
            num_made += len(piece)
        return rows


def _entries(spec: DecoderSpec) -> Iterator[tuple[str, _Entry]]:
    """Yield the tensors of a model by name."""
    shapes, names = DecoderShapes.of(spec), spec.weights
    unprefixed = {shapes.classifier, shapes.classifier_norm}
    placed: list[tuple[Shape | None, str]] = [
        (shape, "" if shape in unprefixed else names.prefixes[0])
        for shape in shapes_around(spec)
    ]
    for index, layer in enumerate(spec.layers):
        prefix = names.prefixes[0] + names.layer.format(layer=index)
        placed += [(shape, prefix) for shape in layer_shapes(spec, layer)]
    if spec.mtp is not None:
        head = spec.mtp
        prefix = head.weights.prefixes[0]
        placed += [(shape, prefix) for shape in shapes_around(head)]
        prefix += head.weights.layer.format(layer=0)
        placed += [(shape, prefix) for shape in layer_shapes(head, head.layers[0])]
    for shape, prefix in placed:
        yield from _tensors(shape, prefix, is_transposed=names.is_transposed)
    if spec.has_head and not spec.is_head_tied:
        yield from _tensors(shapes.head, "", is_transposed=False)
    if spec.vision is not None:
        yield from _vision_entries(spec.vision)


def _vision_entries(spec: VisionSpec) -> Iterator[tuple[str, _Entry]]:
    """Yield the tensors of an encoder of images; the weight of its convolution as a matrix."""
    shapes, names, projector = VisionShapes.of(spec), spec.tower.weights, spec.projector_prefixes[0]
    prefix = names.prefixes[0]
    for shape in (shapes.patches, shapes.class_token, shapes.positions, shapes.pre_norm, shapes.post_norm):
        yield from _tensors(shape, prefix, is_transposed=False)
    for index, layer in enumerate(spec.tower.layers):
        for each in layer_shapes(spec.tower, layer):
            yield from _tensors(each, prefix + names.layer.format(layer=index), is_transposed=False)
    for own in (shapes.projector, *shapes.deep):
        for part in (own.norm, *own.layers):
            yield from _tensors(part, projector, is_transposed=spec.is_projector_transposed)


def _tensors(shape: Shape | None, prefix: str, *, is_transposed: bool) -> Iterator[tuple[str, _Entry]]:
    if shape is None:
        return
    if isinstance(shape, NormShape):
        for name, size in shape.tensors.items():
            yield prefix + name, _Entry(size, is_ones=name.endswith(".weight"))
    elif isinstance(shape, VectorShape):
        yield prefix + shape.name, _Entry(shape.stored)
    elif isinstance(shape, LinearShape):
        for module, rows in ((module, sum(counts)) for module, counts in shape.module_rows):
            yield f"{prefix}{module}.weight", _Entry((shape.width, rows) if is_transposed else (rows, shape.width))
            if shape.has_bias:
                yield f"{prefix}{module}.bias", _Entry((rows,))
    else:
        yield f"{prefix}{shape.module}.weight", _Entry((shape.num_rows, shape.width))
