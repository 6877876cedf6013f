"""Float checkpoints that are quantized while they are read: values, memory, heads, and options that contradict."""

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quire.core.arrays import BFLOAT16, FLOAT32, Array
from quire.core.errors import ConfigError
from quire.kernels import conversion
from quire.kernels.linear_weight import LinearWeight
from quire.kernels.quantized import round_to_nearest
from quire.kernels.reference.back_ends import TORCH
from quire.kernels.torch_arrays import to_array, to_tensor, weight_of_tensors
from quire.model.checkpoints.tensor_reader import TensorReader
from quire.model.config import read_config, spec_from_config
from quire.model.loader import build_decoder, load_model
from quire.model.quantization import (
    CHECKPOINT_METHODS,
    DEFAULT_GROUP_SIZE,
    MAX_ACTIVATION_GROUP,
    ONLINE_METHODS,
    WHOLE_ROW,
    Method,
    Quantization,
    QuantizationOptions,
    activation_group_size,
    resolve,
)
from quire.model.weight_format import ModuleRows, RoundedFormat
from support.memory_checkpoint import MemoryCheckpoint
from support.random_model import write_random_model


def quantization(method: Method, group_size: int = DEFAULT_GROUP_SIZE) -> Quantization:
    return resolve(QuantizationOptions(method, group_size), "config.json")


class CountedCheckpoint(MemoryCheckpoint):
    """A checkpoint in which every tensor is read into memory of its own; counts the bytes of those still in use."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self._alive: list[tuple[weakref.ref[Array], int]] = []
        self.most_bytes = 0

    def read(self, name: str, start: int, stop: int) -> Array:
        part = super().read(name, start, stop).copy()
        self._alive = [(ref, size) for ref, size in self._alive if ref() is not None]
        self._alive.append((weakref.ref(part), part.nbytes))
        self.most_bytes = max(self.most_bytes, sum(size for _, size in self._alive))
        return part


@pytest.mark.parametrize("group_size", [32, WHOLE_ROW])
@pytest.mark.parametrize("method", ONLINE_METHODS)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_modules_become_the_parts_of_one_weight(method: Method, group_size: int, is_transposed: bool) -> None:
    weights = {f"{name}.weight": torch.randn(rows, 72) for name, rows in (("q", 48), ("k", 16), ("v", 16))}
    stored = {name: each.T.contiguous() if is_transposed else each for name, each in weights.items()}
    tensors = TensorReader(MemoryCheckpoint(stored), BFLOAT16)
    weight_format = RoundedFormat(quantization(method, group_size))
    modules = [ModuleRows.whole("q", 48), ModuleRows.whole("k", 16), ModuleRows.whole("v", 16)]
    found = weight_of_tensors(weight_format.read(tensors, modules, 72, is_transposed=is_transposed))
    whole = torch.cat(list(weights.values())).bfloat16()
    expected = round_to_nearest(whole, method, 72 if group_size == WHOLE_ROW else group_size)
    assert (found.format, found.out_features, found.in_features, found.dtype) == (method, 80, 72, torch.bfloat16)
    assert torch.equal(torch.cat(found.data), expected.data[0])
    assert found.scales is not None
    assert expected.scales is not None
    assert torch.equal(found.scales, expected.scales)
    rows = ModuleRows("q", 48, 16, 48)
    ranged = weight_of_tensors(weight_format.read(tensors, [rows], 72, is_transposed=is_transposed))
    assert torch.equal(ranged.data[0], expected.data[0][16:48])
    assert ranged.scales is not None
    assert torch.equal(ranged.scales, expected.scales[16:48])


def test_floats_of_one_tensor_are_in_memory_at_a_time(tmp_path: Path) -> None:
    """The least that quantizing while loading can need; a fused layer's parts are read one after the other."""
    tensors = load_file(write_random_model(tmp_path) / "model.safetensors")
    spec = spec_from_config(read_config(tmp_path))
    table = next(each.nbytes for name, each in tensors.items() if "embed_tokens" in name)
    largest = max(each.nbytes for name, each in tensors.items() if "embed_tokens" not in name)
    counted = CountedCheckpoint(tensors)
    build_decoder(
        spec, counted, dtype="float32", device=torch.device("cpu"), back_end=TORCH,
        weight_format=RoundedFormat(quantization("int4", 32)),
    )  # fmt: skip
    assert counted.most_bytes <= max(table, largest) + 4096, "and norms"


@pytest.mark.parametrize("is_tied", [False, True])
def test_head_is_quantized_to_int8_and_the_embedding_table_is_not(is_tied: bool) -> None:
    table, head = torch.randn(32, 64), torch.randn(32, 64)
    tensors = TensorReader(MemoryCheckpoint({} if is_tied else {"lm_head.weight": head}), FLOAT32)
    before = table.clone()
    found = RoundedFormat(quantization("int4")).read_head(
        tensors, ModuleRows.whole("lm_head", 32), 64, to_array(table) if is_tied else None
    )
    assert found.format == "int8"
    assert torch.equal(to_tensor(found.data[0]), round_to_nearest(table if is_tied else head, "int8", 128).data[0])
    assert torch.equal(table, before)


@pytest.mark.parametrize("method", ONLINE_METHODS)
def test_parameters_are_those_of_the_float_model(tmp_path: Path, method: Method) -> None:
    folder = write_random_model(tmp_path)
    plain = load_model(folder, back_end=TORCH)
    found = load_model(folder, back_end=TORCH, quantization=quantization(method))
    assert found.num_parameters == plain.num_parameters
    assert found.weight_bytes < plain.weight_bytes / 2


@pytest.mark.parametrize(
    ("group_size", "activations", "expected"),
    [
        (8, None, 0),
        (8, "int8", 8),
        (16, None, 16),
        (32, None, 32),
        (32, "bfloat16", 0),
        (64, None, 64),
        (96, None, 96),
        (128, None, 128),
        (128, "bfloat16", 0),
        (256, None, MAX_ACTIVATION_GROUP),
        (WHOLE_ROW, None, MAX_ACTIVATION_GROUP),
        (WHOLE_ROW, "bfloat16", 0),
    ],
)
def test_default_arithmetic_is_by_the_group_size(group_size: int, activations: str | None, expected: int) -> None:
    found = activation_group_size(group_size, activations)  # type: ignore[arg-type]
    assert found == expected
    if found and group_size != WHOLE_ROW:
        assert group_size % found == 0


@pytest.mark.parametrize("group_size", [0, -2, 16, 100, 33])
def test_group_size_that_there_is_none_of_is_refused(group_size: int) -> None:
    with pytest.raises(ConfigError, match=rf"quantization_group_size must be a multiple of 32, or -1 .*{group_size}"):
        QuantizationOptions("int8", group_size)


def test_options_that_nothing_uses_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"quantization_group_size 64 is for quantization int8 or int4, got .*None"):
        QuantizationOptions(None, 64)
    with pytest.raises(ConfigError, match=r"quantization_activations 'int8' is for quantized weights, .*config.json"):
        resolve(QuantizationOptions(None, activations="int8"), "config.json")


@pytest.mark.parametrize("method", CHECKPOINT_METHODS)
def test_format_that_the_folder_does_not_have_is_refused_by_name(method: Method) -> None:
    with pytest.raises(ConfigError, match=f"{method}.* is the format of a checkpoint, and a/config.json has no quant"):
        resolve(QuantizationOptions(method), "a/config.json")


def test_every_method_is_resolved_or_refused() -> None:
    methods = {name for group in get_args(Method) for name in get_args(group) or (group,)}
    assert methods == {"none", *ONLINE_METHODS, *CHECKPOINT_METHODS}
    assert resolve(QuantizationOptions("none"), "config.json") == Quantization()


def test_description_names_format_and_arithmetic() -> None:
    assert str(quantization("int4")) == (
        "int4: int4 weights in groups of 128, int8 activations in groups of 128; "
        "output head: int8 weights in groups of 128, int8 activations in groups of 128"
    )
    expanded = resolve(QuantizationOptions("int8", 32, "bfloat16"), "config.json")
    assert "int8 weights in groups of 32, expanded to the model's dtype" in str(expanded)
    assert "a scale for each output" in str(quantization("int8", WHOLE_ROW))


def test_stacked_weights_are_alike() -> None:
    one, other = (conversion.round_to_nearest(np.ones((4, 32), np.float32), method, 32) for method in ("int8", "int4"))
    with pytest.raises(AssertionError, match="zero points"):
        LinearWeight.stack([one, other])
