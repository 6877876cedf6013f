"""Checkpoints: ranges of rows, checks before anything is read, and models loaded from any implementation."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.core.arrays import BFLOAT16
from quire.core.errors import ModelError
from quire.kernels.reference.back_ends import TORCH
from quire.kernels.torch_arrays import to_tensor
from quire.model.checkpoints.safetensors import SafetensorsCheckpoint
from quire.model.checkpoints.tensor_reader import Checkpoint, read_rows
from quire.model.config import read_config, spec_from_config
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch
from quire.model.loader import build_decoder, load_model
from support.memory_checkpoint import MemoryCheckpoint
from support.random_model import write_random_model
from support.zero_model import write_zero_model

TENSORS = {
    "matrix": torch.arange(70, dtype=torch.float32).view(10, 7).bfloat16(),
    "vector": torch.arange(9, dtype=torch.float16),
    "integers": torch.arange(12, dtype=torch.int32).view(3, 4),
}


@pytest.fixture(params=["memory", "one file", "shards"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    if request.param == "memory":
        return MemoryCheckpoint(TENSORS)
    if request.param == "one file":
        save_file(TENSORS, tmp_path / "model.safetensors")
        return SafetensorsCheckpoint(tmp_path)
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    places = ", ".join(f'"{name}": "{name}.safetensors"' for name in TENSORS)
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{places}}}}}')
    return SafetensorsCheckpoint(tmp_path)


def test_names_shapes_and_dtypes_are_known_before_anything_is_read(checkpoint: Checkpoint) -> None:
    assert set(checkpoint.names) == set(TENSORS)
    assert {name: checkpoint.shape(name) for name in TENSORS} == {"matrix": (10, 7), "vector": (9,), "integers": (3, 4)}
    assert [checkpoint.dtype(name) for name in ("matrix", "vector", "integers")] == ["BF16", "F16", "I32"]


@pytest.mark.parametrize("rows", [(0, 10), (0, 1), (3, 8), (9, 10), (4, 4)])
def test_any_range_of_rows_can_be_read(checkpoint: Checkpoint, rows: tuple[int, int]) -> None:
    found = read_rows(checkpoint, "matrix", (10, 7), rows)
    assert found.dtype == BFLOAT16
    assert torch.equal(to_tensor(found), TENSORS["matrix"][slice(*rows)])
    assert torch.equal(to_tensor(read_rows(checkpoint, "matrix", (10, 7))), TENSORS["matrix"])
    assert torch.equal(to_tensor(read_rows(checkpoint, "vector", (9,), (2, 5))), TENSORS["vector"][2:5])


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("nothing", (1, 2), r"tensor nothing is missing; expected shape \[1, 2\]"),
        ("matrix", (7, 10), r"matrix.* has shape \[10, 7\], expected \[7, 10\]"),
        ("integers", (3, 4), "integers has dtype I32, expected one of F64, F32, F16, BF16; quantized weights need"),
    ],
)
def test_tensor_that_is_not_as_expected_is_refused(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_rows(checkpoint, name, shape)
    if isinstance(checkpoint, MemoryCheckpoint):
        assert not checkpoint.reads


def test_dtypes_are_those_that_a_format_asks_for(checkpoint: Checkpoint) -> None:
    found = read_rows(checkpoint, "integers", (3, 4), (1, 3), dtypes=("I32",))
    assert torch.equal(to_tensor(found), TENSORS["integers"][1:])


def hidden_states(model: Decoder) -> Tensor:
    cache = KVCache.allocate(model.kv_geometry, 2, 16, TORCH)
    tokens = torch.arange(11)
    step = ForwardBatch(tokens, tokens, tokens, torch.tensor([0, 11]).int(), torch.tensor([11]).int(),
                        torch.zeros(1, 1, dtype=torch.int32))
    return model.logits(model.forward(step, cache)).clone()


def test_model_of_a_checkpoint_in_memory_gives_the_bits_of_the_folder(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path)
    checkpoint = MemoryCheckpoint(load_file(folder / "model.safetensors"))
    spec = spec_from_config(read_config(folder))
    model = build_decoder(spec, checkpoint, dtype="float32", device=torch.device("cpu"), back_end=TORCH)
    assert torch.equal(hidden_states(model), hidden_states(load_model(folder, back_end=TORCH)))
    assert {name for name, _, _ in checkpoint.reads} == set(checkpoint.names)


def test_transposed_weights_are_read_from_any_checkpoint(tmp_path: Path) -> None:
    folder = write_zero_model(tmp_path, "GPT2", "float32")
    weights = load_file(folder / "model.safetensors")
    for index, weight in enumerate(weights.values()):
        weight.normal_(std=0.2, generator=torch.Generator().manual_seed(index))
    save_file(weights, folder / "model.safetensors")
    spec = spec_from_config(read_config(folder))
    model = build_decoder(
        spec, MemoryCheckpoint(weights), dtype="float32", device=torch.device("cpu"), back_end=TORCH
    )
    assert torch.equal(hidden_states(model), hidden_states(load_model(folder, back_end=TORCH)))


def test_value_that_is_not_finite_is_refused_with_its_place(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    with pytest.raises(ModelError, match=r"memory of model\.norm\.weight: tensor .* has values that are NaN"):
        build_decoder(
            spec_from_config(read_config(folder)), MemoryCheckpoint(weights), dtype="float32",
            device=torch.device("cpu"), back_end=TORCH,
        )  # fmt: skip
