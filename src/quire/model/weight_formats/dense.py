"""Dense weight format: one tensor `.weight` of floating-point numbers per module."""

from collections.abc import Sequence

from torch import Tensor

from quire.kernels.embedding import Table
from quire.kernels.linear_weight import LinearWeight
from quire.model.checkpoints.tensor_reader import TensorReader
from quire.model.weight_formats.format import ModuleRows


class DenseFormat:
    """A `WeightFormat` of unquantized checkpoints."""

    def read(
        self, tensors: TensorReader, modules: Sequence[ModuleRows], width: int, *, is_transposed: bool
    ) -> LinearWeight:
        """Return the modules' weights as the parts of one; with a single part it may be the file's own memory."""
        return LinearWeight.dense([read_floats(tensors, each, width, is_transposed=is_transposed) for each in modules])

    def read_table(self, tensors: TensorReader, module: ModuleRows, width: int) -> None:
        """Return None: tables are read as floats."""

    def read_head(
        self, tensors: TensorReader, module: ModuleRows, width: int, embedding: Table | None
    ) -> LinearWeight:
        """Return the head. One that is in the checkpoint of a tied model is used, as by transformers 5."""
        if embedding is not None and f"{module.module}.weight" not in tensors.names:
            assert isinstance(embedding, Tensor), "a head of floats tied to a table in another form"
            return LinearWeight.dense(embedding)
        return LinearWeight.dense(read_floats(tensors, module, width))


def read_floats(tensors: TensorReader, module: ModuleRows, width: int, *, is_transposed: bool = False) -> Tensor:
    """Return a module's weight [stop - start, width] in the model's dtype."""
    shape = module.num_rows, width
    return tensors.floats(f"{module.module}.weight", shape, module.rows, is_transposed=is_transposed)
