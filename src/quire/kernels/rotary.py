"""Rotary position embedding on half-split pairs (Su et al. 2021, in the layout of GPT-NeoX and Llama)."""

import torch
from torch import Tensor


def rotary_table(inv_freq: Tensor, max_positions: int, scale: float = 1.0) -> Tensor:
    """Return cosines and sines of every position, [max_positions, rotary_dim] float32: cosines first, then sines.

    inv_freq [rotary_dim / 2] float32, radians per position; `scale` multiplies both (YaRN's attention factor).
    """
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32, device=inv_freq.device), inv_freq.float())
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * scale


def apply_rotary(query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return query and key turned by their positions, in their own dtype; computed in float32, rounded once.

    query [num_tokens, num_heads, head_dim], key [num_tokens, num_kv_heads, head_dim], positions [num_tokens] int,
    cos_sin from `rotary_table`. Dimensions past rotary_dim pass through.
    """
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, rotary_dim / 2]
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*(part.to(x.dtype) for part in turned), x[..., 2 * half :]], dim=-1)
