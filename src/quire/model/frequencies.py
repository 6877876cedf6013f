"""Rotary frequencies, computed in float32 by the same operations as in transformers: at position 100,000 a last bit is
visible. `rope.py` cites the source of each scaling.
"""

import math

import torch
from torch import Tensor

from quire.model.spec import Rotary, SpecError


def inverse_frequencies(rotary: Rotary, num_positions: int) -> Tensor:
    """Return radians per position of each pair of dimensions, float32 [head_dim / 2]. SpecError if one is infinite.

    `num_positions`: the longest sequence to be served. Dynamic scaling applies only if that is beyond the original
    length, and then as for the longest sequence that the scaling provides: results do not depend on by how much. So do
    longrope's divisors of long sequences, for all positions.
    """
    exponents = torch.arange(0, rotary.head_dim, 2, dtype=torch.int64).float() / rotary.head_dim
    per_radian = torch.pow(_theta(rotary, num_positions), exponents)
    if rotary.long is not None:
        divisors = rotary.long[1] if num_positions > rotary.long[0] else rotary.divisors
        inv_freq = 1.0 / (torch.tensor(divisors) * per_radian)
    else:
        inv_freq = _scaled(rotary, per_radian)
        if rotary.divisors is not None:
            inv_freq = inv_freq / torch.tensor(rotary.divisors)
    if not bool(inv_freq.isfinite().all()) or not math.isfinite(rotary.scale):
        raise SpecError("rotary frequencies are not finite")
    return inv_freq


def _theta(rotary: Rotary, num_positions: int) -> float:
    if rotary.dynamic is None or num_positions <= rotary.dynamic[0]:
        return rotary.theta
    (original, factor), head_dim = rotary.dynamic, rotary.head_dim
    stretched: float = (factor * rotary.max_positions / original - (factor - 1)) ** (head_dim / (head_dim - 2))
    return rotary.theta * stretched


def _scaled(rotary: Rotary, per_radian: Tensor) -> Tensor:
    if rotary.ramp is not None:
        return _interpolated(rotary, per_radian, *rotary.ramp)
    if rotary.turns is not None:
        return _slowed_down(rotary, 1.0 / per_radian, *rotary.turns)
    return 1.0 / per_radian / rotary.factor


def _slowed_down(rotary: Rotary, inv_freq: Tensor, original: float, low: float, high: float) -> Tensor:
    """Llama 3.1: pairs that turn fewer than `low` times in the original length slowed down, more than `high` kept."""
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    ramp = (1 - smooth) * inv_freq / rotary.factor + smooth * inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / rotary.factor, ramp)
    return torch.where(wavelength < original / high, inv_freq, scaled)


def _interpolated(rotary: Rotary, per_radian: Tensor, first: float, last: float) -> Tensor:
    """YaRN: pairs before `first` kept, after `last` interpolated."""
    width = last - first or 0.001  # a ramp of one point: anything small, as in the original
    ramp = ((torch.arange(len(per_radian), dtype=torch.float32) - first) / width).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rotary.factor * per_radian) * (1 - kept) + 1.0 / per_radian * kept
