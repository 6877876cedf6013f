"""Tensors of a checkpoint as a weight format reads them: floats in the model's dtype, and anything else as stored."""

import numpy as np
import pytest
import torch

from quire.core.arrays import BFLOAT16, FLOAT16, FLOAT32, Array, bits
from quire.core.errors import ModelError
from quire.kernels.torch_arrays import to_tensor
from quire.model.checkpoints import tensor_reader
from quire.model.checkpoints.tensor_reader import TensorReader
from support.memory_checkpoint import MemoryCheckpoint

TENSORS = {
    "matrix": torch.arange(70, dtype=torch.float32).view(10, 7),
    "integers": torch.arange(12, dtype=torch.int32).view(4, 3),
    "large": torch.tensor([1.0, 1e5]),
}


@pytest.fixture
def reader() -> TensorReader:
    return TensorReader(MemoryCheckpoint(TENSORS), BFLOAT16)


def test_floats_come_in_the_models_dtype_or_another(reader: TensorReader) -> None:
    assert torch.equal(to_tensor(reader.floats("matrix", (10, 7))), TENSORS["matrix"].bfloat16())
    found = reader.floats("matrix", (10, 7), (2, 5), dtype=FLOAT32)
    assert torch.equal(to_tensor(found), TENSORS["matrix"][2:5])
    assert reader.names_read == {"matrix"}


@pytest.mark.parametrize("rows", [None, (3, 9)])
def test_large_tensor_is_converted_a_part_at_a_time(
    reader: TensorReader, rows: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = reader.floats("matrix", (10, 7), rows)
    monkeypatch.setattr(tensor_reader, "ELEMENTS_AT_ONCE", 14)
    asked = list[tuple[int, int]]()

    class Watched(MemoryCheckpoint):
        def read(self, name: str, start: int, stop: int) -> Array:
            asked.append((start, stop))
            return super().read(name, start, stop)

    watched = TensorReader(Watched(TENSORS), BFLOAT16)
    np.testing.assert_array_equal(bits(watched.floats("matrix", (10, 7), rows)), bits(whole))
    start, stop = rows or (0, 10)
    assert asked == [(first, min(first + 2, stop)) for first in range(start, stop, 2)]
    asked.clear()
    watched.floats("matrix", (10, 7), rows, dtype=FLOAT32)
    assert asked == [(start, stop)]


@pytest.mark.parametrize("rows", [None, (2, 5)])
def test_rows_of_a_transposed_tensor_are_columns_of_the_files(
    reader: TensorReader, rows: tuple[int, int] | None
) -> None:
    found = reader.floats("matrix", (7, 10), rows, is_transposed=True)
    assert torch.equal(to_tensor(found), TENSORS["matrix"].T[slice(*(rows or (0, 7)))].bfloat16())


def test_integers_come_as_stored(reader: TensorReader) -> None:
    assert reader.shape("integers") == (4, 3)
    assert reader.stored_dtype("integers") == "I32"
    found = reader.raw("integers", (4, 3), ("I32",), (1, 3))
    assert torch.equal(to_tensor(found), TENSORS["integers"][1:3])
    assert reader.names_read == {"integers"}


def test_what_is_not_as_expected_is_refused_by_name(reader: TensorReader) -> None:
    with pytest.raises(ModelError, match="tensor integers has dtype I32, expected one of U8, I8"):
        reader.raw("integers", (4, 3), ("U8", "I8"))
    with pytest.raises(ModelError, match=r"tensor integers has shape \[4, 3\], expected \[3, 4\]"):
        reader.raw("integers", (3, 4), ("I32",))
    reader = TensorReader(MemoryCheckpoint(TENSORS), FLOAT16)
    with pytest.raises(ModelError, match=r"memory of large: tensor large has values that are NaN or infinite in .*16"):
        reader.floats("large", (2,))
    assert not reader.names_read
    assert str(reader.error("large", "is odd")) == "memory of large: tensor large is odd"
    assert str(reader.error("nothing", "is missing")) == "memory: tensor nothing is missing"
