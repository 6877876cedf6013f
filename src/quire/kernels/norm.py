"""Norms: RMSNorm and LayerNorm, optionally after adding the residual stream."""

from typing import Protocol

from quire.kernels.tensors import Tensor


class Norm(Protocol):
    """A norm that has its parameters."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return `(normed, summed)`: summed = x + residual, normed = norm(summed), all [..., width] of one dtype.

        Without a residual, summed is x. With one, the results may stand in the memory of the arguments: do not use
        those afterwards.
        """
