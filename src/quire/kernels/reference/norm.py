"""RMSNorm and LayerNorm, optionally after adding the residual stream.

Both reduce over the last, contiguous dimension only, which torch does row by row in an order that depends on the
row's width alone (tests/kernels/test_norm.py holds it to that).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TorchNorm:
    """RMSNorm or, with `centers`, LayerNorm; weight [width], bias [width] or none, and never one in RMSNorm.

    A weight [num_heads, width] without a bias belongs to heads x [..., num_heads, width], each with weights of its own.

    RMSNorm (Zhang and Sennrich 2019) is computed in float32 and rounded to x's dtype before the weight is applied, as
    transformers does; LayerNorm (Ba et al. 2016) is PyTorch's. With an `offset`, RMSNorm multiplies with weight +
    offset in float32 and rounds once: OLMo 2's with 0, Gemma's with 1.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    centers: bool
    offset: float | None = None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return `(normed, summed)` in memory of their own."""
        summed = x if residual is None else x + residual
        if self.centers and self.weight.dim() == 1:
            return F.layer_norm(summed, self.weight.shape, self.weight, self.bias, self.eps), summed
        wide = summed.float()
        if self.centers:  # the float32 kernel, since torch's takes the same weights for all rows
            return (F.layer_norm(wide, self.weight.shape[1:], eps=self.eps) * self.weight.float()).to(x.dtype), summed
        inverse = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.eps)
        if self.offset is not None:
            return (wide * inverse * (self.weight.float() + self.offset)).to(x.dtype), summed
        return self.weight * (wide * inverse).to(x.dtype), summed
