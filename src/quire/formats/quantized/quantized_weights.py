"""Folders with quantized weights: the model source, the scheme of each module, and fused modules as one weight."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quire.core.arrays import FLOAT8_E4M3, FLOAT32, Array, dtype_name, empty
from quire.core.errors import ConfigError
from quire.formats.quantized.compressed_tensors import read_float_codes, read_packed
from quire.formats.quantized.method_configs import quantization_from_config
from quire.formats.quantized.schemes import HEAD, Storage, StoredQuantization, StoredScheme
from quire.formats.quantized.stored_weights import StoredModule, read_awq, read_gptq, read_mxfp4, read_plain
from quire.kernels.conversion import convert, converted
from quire.kernels.linear_weight import DENSE, FP8, LinearWeight, Table, WeightPortions
from quire.model.checkpoints.safetensors import SafetensorsCheckpoint
from quire.model.checkpoints.tensor_reader import TensorReader
from quire.model.config import read_config, spec_from_config
from quire.model.config_reader import CONFIG_FILE
from quire.model.quantization import (
    CONFIG_KEYS,
    WHOLE_ROW,
    Activations,
    Quantization,
    QuantizationOptions,
    WeightScheme,
    activation_group_size,
)
from quire.model.source import FolderSource
from quire.model.weight_format import DenseFormat, ModuleRows, StoredTensors, read_floats

FLOAT_ELEMENTS = "fp8", "codebook4"
MAX_TOKEN_INPUTS = 1 << 16  # inputs that share a scale where checkpoints say one for each token: all, up to these


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderQuantization(Quantization):
    """A `Quantization` with a scheme for each module."""

    stored: StoredQuantization
    activations: Activations | None = None  # asked for; None: the default for each module

    def scheme(self, modules: Sequence[str]) -> WeightScheme:
        """Return the scheme of the layer that modules are fused to: dense where they differ."""
        return weight_scheme(self.stored.fused_scheme(modules), self.activations)


def folder_quantization(asked: QuantizationOptions, stored: StoredQuantization, source: str) -> FolderQuantization:
    """Return the quantization of a folder. ConfigError for options that contradict it; `source` names its config."""
    if asked.method not in (None, stored.method):
        raise ConfigError(
            f"quantization {asked.method!r} contradicts {source}: {CONFIG_KEYS[0]} says {stored.method!r}"
        )
    floats = [scheme.element for scheme in stored.schemes if scheme.element in FLOAT_ELEMENTS]
    if asked.activations == "int8" and floats:
        raise ConfigError(
            f"quantization_activations 'int8' is for integer weights, and {source} has {floats[0]} weights"
        )
    layers = weight_scheme(stored.schemes[-1] if stored.schemes else None, asked.activations)
    head = weight_scheme(stored.scheme(HEAD), asked.activations)
    return FolderQuantization(stored.method, layers, head, stored=stored, activations=asked.activations)


def weight_scheme(scheme: StoredScheme | None, activations: Activations | None) -> WeightScheme:
    """Return the scheme of a weight as a checkpoint has it; None is dense. activations: as in `QuantizationOptions`."""
    if scheme is None:
        return WeightScheme()
    group_size, correction = scheme.group_size or WHOLE_ROW, "zeros" if scheme.has_zero_points else "constant"
    activation_groups = 0 if scheme.element in FLOAT_ELEMENTS else activation_group_size(group_size, activations)
    if scheme.quantizes_activations and activations != "bfloat16":
        activation_groups = scheme.group_size or MAX_TOKEN_INPUTS
    return WeightScheme(scheme.element, group_size, activation_groups, correction)


log = logging.getLogger(__name__)

_READERS: Mapping[Storage, Callable[[StoredModule], LinearWeight]] = {
    "gptq": read_gptq,
    "awq": read_awq,
    "packed": read_packed,
    "float_codes": read_float_codes,
    "plain": read_plain,
    "mxfp4": read_mxfp4,
}
ELEMENTS_AT_ONCE = 1 << 20  # expanded at a time
_OTHER_NAMES = ("gptq", "awq", "mxfp4")  # quantized modules have no tensor `.weight`


def open_quantized(folder: Path, quantization: FolderQuantization) -> StoredTensors:
    """Return the tensors of a folder with quantized weights."""
    weight_format = QuantizedFormat(quantization.stored, quantization.activations)
    return StoredTensors(SafetensorsCheckpoint(folder), weight_format)


class QuantizedFormat:
    """A `WeightFormat` of quantized checkpoints. `activations`: asked for; None: the default for each module."""

    def __init__(self, quantization: StoredQuantization, activations: Activations | None) -> None:
        self._quantization = quantization
        self._activations = activations
        self._has_warned = False  # logged once that modules of one layer differ

    def read(
        self, tensors: TensorReader, modules: Sequence[ModuleRows], width: int, *, is_transposed: bool
    ) -> LinearWeight:
        """Return the modules' weights as one, quantized where all modules are, in the same way."""
        parts = [self._module(tensors, each, width, is_transposed=is_transposed) for each in modules]
        weight = fused(parts)
        if weight.format == DENSE and {part.format for part in parts} != {DENSE} and not self._has_warned:
            names = ", ".join(each.module for each in modules)
            log.warning("%s differ in format: such layers are expanded to %s", names, dtype_name(tensors.dtype))
            self._has_warned = True
        return weight

    def read_table(self, tensors: TensorReader, module: ModuleRows, width: int) -> None:
        """Return None: tables are read as floats."""

    def tied_weight(
        self, tensors: TensorReader, module: ModuleRows, width: int
    ) -> Callable[[], LinearWeight | WeightPortions] | None:
        """Return what reads the table, of floats."""
        return DenseFormat().tied_weight(tensors, module, width)

    def read_head(
        self, tensors: TensorReader, module: ModuleRows, width: int, embedding: Table | None
    ) -> LinearWeight:
        """Return the head as the checkpoint has it."""
        has_tensors = any(name.startswith(f"{module.module}.") for name in tensors.names)
        if self._scheme(tensors, module) is None or (embedding is not None and not has_tensors):
            return DenseFormat().read_head(tensors, module, width, embedding)
        return self._module(tensors, module, width, is_transposed=False)

    def _module(
        self, tensors: TensorReader, module: ModuleRows, width: int, *, is_transposed: bool
    ) -> LinearWeight:
        scheme = self._scheme(tensors, module)
        if scheme is None:
            return LinearWeight.dense(read_floats(tensors, module, width, is_transposed=is_transposed))
        weight = _READERS[scheme.storage](StoredModule(tensors, scheme, module, width))
        return replace(weight, activation_group_size=weight_scheme(scheme, self._activations).activation_group_size)

    def _scheme(self, tensors: TensorReader, module: ModuleRows) -> StoredScheme | None:
        """Return the scheme of a module; None for dense ones, also those that only the tensors show to be dense."""
        scheme, name = self._quantization.scheme(module.module), module.module
        is_dense = f"{name}.weight" in tensors.names and f"{name}.qweight" not in tensors.names
        return None if scheme is not None and scheme.storage in _OTHER_NAMES and is_dense else scheme


def fused(parts: Sequence[LinearWeight]) -> LinearWeight:
    """Return one weight with the rows of all parts; of expanded values where the parts differ in their formats."""
    if len(parts) == 1:
        return parts[0]
    if not all(_is_alike(part, parts[0]) for part in parts[1:]):
        return LinearWeight.dense([_values(part) for part in parts])
    if parts[0].format == DENSE:
        return LinearWeight.dense([tensor for part in parts for tensor in part.data])
    zeros = {part.zero_points if isinstance(part.zero_points, int) else None for part in parts}
    return LinearWeight.stack(parts if len(zeros) == 1 else [_with_zero_points(part) for part in parts])


def _is_alike(part: LinearWeight, other: LinearWeight) -> bool:
    for field in ("format", "group_size", "activation_group_size"):
        if getattr(part, field) != getattr(other, field):
            return False
    if part.group_index is None or other.group_index is None:
        return part.group_index is other.group_index
    return np.array_equal(part.group_index, other.group_index)


def _with_zero_points(part: LinearWeight) -> LinearWeight:
    """Return a weight with a zero point for each scale."""
    if not isinstance(part.zero_points, int) or part.scales is None:
        return part
    return replace(part, zero_points=np.full_like(part.scales, part.zero_points, dtype=np.uint8))


def _values(part: LinearWeight) -> Array:
    """Return the values of a weight of one part in the model's dtype; `quantized.expand` has their meaning."""
    (elements,) = part.data
    if part.format == DENSE:
        found: Array = elements
        return found
    values, num_rows = empty((part.out_features, part.in_features), part.value_dtype), part.out_features
    step = max(ELEMENTS_AT_ONCE // part.in_features, 1)
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        with np.errstate(all="ignore"):
            convert(_row_values(part, elements, rows), values[rows])
    return values


def _row_values(part: LinearWeight, elements: Array, rows: slice) -> Array:
    """Return the values of some rows in float32."""
    groups = np.arange(part.in_features) // part.group_size if part.group_index is None else part.group_index
    assert part.scales is not None, f"a weight of {part.format} without scales"
    assert part.minimums is None, "minimums are of a format with equal parts"
    stored, zeros = elements[rows], part.zero_points
    if part.format == FP8:
        numbers = converted(stored.view(FLOAT8_E4M3), FLOAT32)
    elif part.codebook is not None:
        numbers = part.codebook[stored]
    else:
        assert zeros is not None, "integers without zero points"
        points = np.float32(zeros) if isinstance(zeros, int) else zeros[rows].astype(np.float32)[:, groups]
        numbers = stored.astype(np.float32) - points
    values: Array = part.scales[rows][:, groups] * numbers
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedSource(FolderSource):
    """A `ModelSource` of a folder with quantized weights."""

    stored: StoredQuantization

    def quantization(self, asked: QuantizationOptions) -> FolderQuantization:
        """Return the quantization of the folder."""
        return folder_quantization(asked, self.stored, self.config_place)

    def open_tensors(self, quantization: Quantization) -> StoredTensors:
        """Return the tensors of the safetensors files."""
        assert isinstance(quantization, FolderQuantization)
        return open_quantized(self.path, quantization)


def read_quantized(path: Path) -> QuantizedSource:
    """Read the config of a folder with quantized weights. ModelError for one that is not supported names the option."""
    config, place = read_config(path), str(path / CONFIG_FILE)
    stored = quantization_from_config(config, place)
    assert stored is not None, "the caller has looked"
    return QuantizedSource(path, config, place, spec_from_config(config, place), stored=stored)
