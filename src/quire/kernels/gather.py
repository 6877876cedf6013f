"""Gather protocol: the exchange of columns between ranks of tensor parallelism, as layer programs call it."""

from typing import Protocol

from torch import Tensor


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
