"""Layers as layer programs call them: linear layers, norms, and exchanges between ranks of tensor parallelism."""

from typing import Literal, Protocol

from quire.kernels.tensors import DType, Tensor

Activation = Literal[
    "none", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "clamped_silu_and_mul", "gelu_tanh", "gelu", "relu"
]  # fmt: skip
GATED: tuple[Activation, ...] = (  # two layers each, gate and up
    "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "clamped_silu_and_mul"
)  # fmt: skip


class Linear(Protocol):
    """A layer; `num_bytes` is what its packed weight takes."""

    num_bytes: int

    def __call__(self, x: Tensor, addend: Tensor | None = None, /) -> Tensor:
        """Return [num_rows, out_features] for x [num_rows, in_features].

        addend: float32 [num_rows, rows of the weight], added to the sums before the bias and the activation.
        """


class Norm(Protocol):
    """A norm that has its parameters."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return `(normed, summed)`: summed = x + residual, normed = norm(summed), all [..., width] of one dtype.

        Without a residual, summed is x. With one, the results may stand in the memory of the arguments: do not use
        those afterwards.
        """


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
