"""RMSNorm and LayerNorm, optionally after adding the residual stream.

Both reduce over the last, contiguous dimension only, which torch does row by row in an order that depends on the
row's width alone (tests/kernels/test_norm.py holds it to that).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Norm(Protocol):
    """A norm that has its parameters."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return `(normed, summed)`: summed = x + residual, normed = norm(summed), all [..., width] of one dtype.

        Without a residual, summed is x. With one, the results may stand in the memory of the arguments: do not use
        those afterwards.
        """


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return `(normed, summed)`: summed = x + residual (x itself without one), normed = RMSNorm(summed) * weight.

    x and residual [..., width] of one dtype, weight [width]. Computed in float32 and rounded to x's dtype before the
    weight is applied, as transformers does. Zhang and Sennrich 2019.
    """
    summed = x if residual is None else x + residual
    wide = summed.float()
    inverse = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return weight * (wide * inverse).to(x.dtype), summed


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `(normed, summed)` as `rms_norm` does, for LayerNorm with weight and bias [width]. Ba et al. 2016."""
    summed = x if residual is None else x + residual
    return F.layer_norm(summed, weight.shape, weight, bias, eps), summed


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """`rms_norm` with its parameters."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return `(normed, summed)` in memory of their own."""
        return rms_norm(x, self.weight, self.eps, residual)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """`layer_norm` with its parameters."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return `(normed, summed)` in memory of their own."""
        return layer_norm(x, self.weight, self.bias, self.eps, residual)
