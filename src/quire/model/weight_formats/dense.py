"""Dense weight format: one tensor `.weight` of floating-point numbers per module."""

from collections.abc import Sequence

from quire.kernels.linear import DENSE, LinearWeight
from quire.model.weight_formats.format import ReadTensors


class DenseFormat:
    """A `WeightFormat` of unquantized checkpoints."""

    name = DENSE

    def read(
        self, tensors: ReadTensors, modules: Sequence[str], num_rows: Sequence[int], width: int, *, is_transposed: bool
    ) -> LinearWeight:
        """Return the modules' weights as the parts of one; with a single part it may be the file's own memory."""
        names, shapes = [f"{module}.weight" for module in modules], [(count, width) for count in num_rows]
        return LinearWeight.dense(tensors(names, [*shapes], is_transposed=is_transposed))
