"""Weight format protocol: reading the weight of one linear layer from a checkpoint."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quire.kernels.linear_weight import LinearWeight, StoredTable, Table
from quire.model.checkpoints.tensor_reader import Checkpoint, TensorReader


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
