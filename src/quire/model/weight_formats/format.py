"""Weight format protocol: reading the weight of one linear layer from a checkpoint."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from quire.kernels.linear import LinearWeight


class ReadTensors(Protocol):
    """Reader of a model's tensors, checked and in the model's dtype, on its device."""

    def __call__(
        self, names: list[str], shapes: list[tuple[int, ...]], *, is_transposed: bool = False
    ) -> list[Tensor]:
        """Return tensors of the given shapes; a transposed one has its shape reversed in the file."""


class WeightFormat(Protocol):
    """Format of the linear weights of a checkpoint. `name` is the tag of its `LinearWeight` and its key in `sizes`."""

    name: str

    def read(
        self, tensors: ReadTensors, modules: Sequence[str], num_rows: Sequence[int], width: int, *, is_transposed: bool
    ) -> LinearWeight:
        """Return the weight of modules fused row by row: module i has `num_rows[i]` outputs of `width` inputs."""
