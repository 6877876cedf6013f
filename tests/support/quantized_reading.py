"""Reading of linear weights as the model reads them: whole, or in parts."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from quire.core.model_files import read_json_object
from quire.formats.quantized.method_configs import quantization_from_config
from quire.formats.quantized.quantized_weights import QuantizedFormat
from quire.kernels.linear_weight import DENSE, LinearWeight
from quire.kernels.quantized import expand
from quire.kernels.torch_arrays import array_dtype, weight_of_tensors
from quire.model.checkpoints.safetensors import SafetensorsCheckpoint
from quire.model.checkpoints.tensor_reader import TensorReader
from quire.model.quantization import Activations
from quire.model.weight_format import ModuleRows
from support.quantized_folder import Pair, linears


def weight_format(folder: Path, activations: Activations | None = "bfloat16") -> QuantizedFormat:
    """Return the format of a folder."""
    quantization = quantization_from_config(read_json_object(folder, "config.json"), str(folder / "config.json"))
    assert quantization is not None
    return QuantizedFormat(quantization, activations)


def read(
    folder: Path,
    *modules: tuple[str, int],
    width: int,
    rows: Sequence[tuple[int, int]] = (),
    dtype: torch.dtype = torch.float32,
    activations: Activations | None = "bfloat16",
) -> LinearWeight:
    """Return the weight of modules, names and outputs, fused; `rows` are the outputs to read of each, or all."""
    tensors = TensorReader(SafetensorsCheckpoint(folder), array_dtype(dtype))
    ranges = rows or [(0, num_rows) for _, num_rows in modules]
    parts = [ModuleRows(*module, *ends) for module, ends in zip(modules, ranges, strict=True)]
    return weight_of_tensors(weight_format(folder, activations).read(tensors, parts, width, is_transposed=False))


def values(weight: LinearWeight) -> Tensor:
    """Return the values of a weight, in float32."""
    return torch.cat(weight.data) if weight.format == DENSE else expand(weight)


def misread(pair: Pair, weight_format: str) -> list[str]:
    """Return the linear layers that are read in another format, or with other values than the definition gives."""
    found = {name: read(pair.folder, (name, num_rows), width=width) for name, num_rows, width in linears()}
    return [
        name
        for name, weight in found.items()
        if weight.format != weight_format or not torch.equal(values(weight), pair.values[name])
    ]
