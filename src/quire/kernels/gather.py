"""Exchange protocols of tensor parallelism, as layer programs call them: of columns, and of partial sums."""

from typing import Protocol

from quire.kernels.tensors import DType, Tensor


class GatherHook(Protocol):
    """Exchange of an activation's columns between the ranks of tensor parallelism."""

    @property
    def num_own(self) -> int:
        """Columns that this rank computes."""

    @property
    def width(self) -> int:
        """Columns of all ranks."""

    @property
    def address(self) -> tuple[int, int] | None:
        """A C function (csrc/kernels.hpp, ColumnExchange) and its context, which does the same; None: there is none."""

    def __call__(self, own: Tensor) -> Tensor:
        """Return [num_tokens, width] of all ranks' columns, for own [num_tokens, num_own]."""


class SumHook(Protocol):
    """Sum of partial sums over the ranks of tensor parallelism, on CPUs added in the order of the ranks.

    Every rank gets the same bits, which depend on the number of ranks.
    """

    @property
    def partial_dtype(self) -> DType | None:
        """The dtype of partial sums; None: the model's."""

    @property
    def address(self) -> tuple[int, int] | None:
        """A C function (csrc/kernels.hpp, SumExchange) and its context, which does the same; None: there is none."""

    def __call__(self, own: Tensor, dtype: DType) -> Tensor:
        """Return the sums [num_tokens, width] of all ranks' `own`, partial sums of that shape, rounded to `dtype`."""
