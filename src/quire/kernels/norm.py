"""RMSNorm and LayerNorm, optionally after adding the residual stream.

Computed in float32 and rounded to the activations' dtype before the weight is applied, as transformers does for
Llama. A row's sum is taken in an order that depends on the row's width alone: see `_row_mean`.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return `(normed, summed)`: summed = x + residual (x itself without one), normed = RMSNorm(summed) * weight.

    x and residual [..., width] of one dtype, weight [width]. Zhang and Sennrich 2019.
    """
    summed = x if residual is None else x + residual
    wide = summed.float()
    inverse = torch.rsqrt(_row_mean(wide * wide) + eps)
    return weight * (wide * inverse).to(x.dtype), summed


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `(normed, summed)` as `rms_norm` does, for LayerNorm with weight and bias [width]. Ba et al. 2016."""
    summed = x if residual is None else x + residual
    wide = summed.float()
    centred = wide - _row_mean(wide)
    normed = centred * torch.rsqrt(_row_mean(centred * centred) + eps) * weight.float()
    if bias is not None:
        normed = normed + bias.float()
    return normed.to(x.dtype), summed


def _row_mean(rows: Tensor) -> Tensor:
    """Mean over the last dimension, [..., width] to [..., 1], adding halves onto each other until one is left."""
    width = rows.shape[-1]
    while (length := rows.shape[-1]) > 1:
        half = length // 2
        folded = rows[..., :half] + rows[..., half : 2 * half]
        rows = folded if length % 2 == 0 else torch.cat([folded, rows[..., -1:]], dim=-1)
    return rows / width
