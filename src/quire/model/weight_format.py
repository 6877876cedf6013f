"""Weight formats: the tensors of a checkpoint that make a `LinearWeight`, and the formats of floats.

Here are the formats that read floats, dense or rounded to fewer bits; `quire.formats` has the others. Loads no torch.

One tensor is quantized at a time, and its floats are dropped before the next is read.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from quire.core.arrays import FLOAT16, Array
from quire.kernels.conversion import round_to_nearest
from quire.kernels.linear_weight import LinearWeight, StoredTable, Table, WeightPortions
from quire.model.checkpoints.tensor_reader import Checkpoint, TensorReader
from quire.model.quantization import UNQUANTIZED, WHOLE_ROW, Quantization, WeightScheme


class ModuleRows(NamedTuple):
    """Outputs [start, stop) of a module that has `num_rows`; ranges that are not whole are cut at multiples of 16."""

    module: str
    num_rows: int
    start: int
    stop: int

    @classmethod
    def whole(cls, module: str, num_rows: int) -> "ModuleRows":
        """Return all outputs of a module."""
        return cls(module, num_rows, 0, num_rows)

    @property
    def rows(self) -> tuple[int, int]:
        """First output, and the one past the last."""
        return self.start, self.stop


class WeightFormat(Protocol):
    """Format of the linear weights of a checkpoint."""

    def read(
        self, tensors: TensorReader, modules: Sequence[ModuleRows], width: int, *, is_transposed: bool
    ) -> LinearWeight:
        """Return the weight of modules fused row by row, each with `width` inputs.

        `is_transposed`: float weights are stored as [in_features, out_features].
        """

    def read_table(self, tensors: TensorReader, module: ModuleRows, width: int) -> StoredTable | None:
        """Return the embedding table in the checkpoint's own form; None: it is read as floats."""

    def tied_weight(
        self, tensors: TensorReader, module: ModuleRows, width: int
    ) -> Callable[[], LinearWeight | WeightPortions] | None:
        """Return what reads the embedding table as the weight of a head, from which a kernel looks its rows up.

        None: a tied head has other values than the table, or the checkpoint one of its own.
        """

    def read_head(
        self, tensors: TensorReader, module: ModuleRows, width: int, embedding: Table | None
    ) -> LinearWeight:
        """Return the weight of the output head: the checkpoint's, or if it has none the embedding table.

        embedding: of a tied head, [stop - start, width] in the model's dtype, or the whole table that `read_table`
        returned; None: the head is not tied.
        """


class StoredTensors(NamedTuple):
    """Tensors of a model as stored, and the format of those that make linear layers."""

    checkpoint: Checkpoint
    weight_format: WeightFormat


class DenseFormat:
    """A `WeightFormat` of unquantized checkpoints."""

    def read(
        self, tensors: TensorReader, modules: Sequence[ModuleRows], width: int, *, is_transposed: bool
    ) -> LinearWeight:
        """Return the modules' weights as the parts of one; with a single part it may be the file's own memory."""
        return LinearWeight.dense([read_floats(tensors, each, width, is_transposed=is_transposed) for each in modules])

    def read_table(self, tensors: TensorReader, module: ModuleRows, width: int) -> None:
        """Return None: tables are read as floats."""

    def tied_weight(
        self, tensors: TensorReader, module: ModuleRows, width: int
    ) -> Callable[[], LinearWeight | WeightPortions] | None:
        """Return what reads the table; in float16 a kernel has a head in float32."""
        if tensors.dtype == FLOAT16:
            return None
        return lambda: LinearWeight.dense(read_floats(tensors, module, width))

    def read_head(
        self, tensors: TensorReader, module: ModuleRows, width: int, embedding: Table | None
    ) -> LinearWeight:
        """Return the head. One that is in the checkpoint of a tied model is used, as by transformers 5."""
        if embedding is not None and f"{module.module}.weight" not in tensors.names:
            assert isinstance(embedding, np.ndarray), "a head of floats tied to a table in another form"
            return LinearWeight.dense(embedding)
        return LinearWeight.dense(read_floats(tensors, module, width))


def read_floats(tensors: TensorReader, module: ModuleRows, width: int, *, is_transposed: bool = False) -> Array:
    """Return a module's weight [stop - start, width] in the model's dtype."""
    shape = module.num_rows, width
    return tensors.floats(f"{module.module}.weight", shape, module.rows, is_transposed=is_transposed)


class RoundedFormat:
    """A `WeightFormat` of float checkpoints for the engine's own quantization."""

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization

    def read(
        self, tensors: TensorReader, modules: Sequence[ModuleRows], width: int, *, is_transposed: bool
    ) -> LinearWeight:
        """Return the modules' weights as the parts of one."""
        layers = self._quantization.layers
        return LinearWeight.stack(
            [_rounded(read_floats(tensors, each, width, is_transposed=is_transposed), layers) for each in modules]
        )

    @property
    def vision(self) -> "RoundedFormat":
        """The format of an encoder of images."""
        return RoundedFormat(replace(self._quantization, layers=self._quantization.vision))

    def read_table(self, tensors: TensorReader, module: ModuleRows, width: int) -> None:
        """Return None: tables are read as floats."""

    def tied_weight(self, tensors: TensorReader, module: ModuleRows, width: int) -> None:
        """Return None: the head is rounded, and the table is not."""

    def read_head(
        self, tensors: TensorReader, module: ModuleRows, width: int, embedding: Table | None
    ) -> LinearWeight:
        """Return the head; a tied one is quantized beside the embedding table, which stays as it is."""
        (weight,) = DenseFormat().read_head(tensors, module, width, embedding).data
        return _rounded(weight, self._quantization.head)


def vision_format(weight_format: WeightFormat) -> WeightFormat:
    """Return the format of the layers of an encoder of images that is loaded with a model of a format."""
    return weight_format.vision if isinstance(weight_format, RoundedFormat) else DenseFormat()


def tensors_of_floats(checkpoint: Checkpoint, quantization: Quantization) -> StoredTensors:
    """Return the tensors of a checkpoint of floats; its weights are kept as they are or quantized."""
    is_dense = quantization == UNQUANTIZED
    return StoredTensors(checkpoint, DenseFormat() if is_dense else RoundedFormat(quantization))


def _rounded(weight: Array, scheme: WeightScheme) -> LinearWeight:
    group_size = weight.shape[1] if scheme.group_size == WHOLE_ROW else scheme.group_size
    return round_to_nearest(
        weight, scheme.format, group_size, activation_group_size=scheme.activation_group_size
    )
