"""Rotary frequencies, computed in float32 by the same operations as in transformers: at position 100,000 a last bit is
visible. Powers alone are computed in double and rounded once, for float32 libraries differ in them
(docs/decisions/0032). `rope.py` cites the source of each scaling.
"""

import math

import numpy as np

from quire.core.arrays import FLOAT32, Array
from quire.model.spec import Rotary, SpecError


def inverse_frequencies(rotary: Rotary, num_positions: int) -> Array:
    """Return radians per position of each pair of dimensions, float32 [head_dim / 2]. SpecError if one is infinite.

    `num_positions`: the longest sequence to be served. Dynamic scaling applies only if that is beyond the original
    length, and then as for the longest sequence that the scaling provides: results do not depend on by how much. So do
    longrope's divisors of long sequences, for all positions.
    """
    with np.errstate(all="ignore"):
        found = _inverse_frequencies(rotary, num_positions)
    if not np.isfinite(found).all() or not math.isfinite(rotary.scale):
        raise SpecError("rotary frequencies are not finite")
    return found


def _inverse_frequencies(rotary: Rotary, num_positions: int) -> Array:
    exponents = np.arange(0, rotary.head_dim, 2, dtype=np.float32) / rotary.head_dim
    theta = np.float64(np.float32(_theta(rotary, num_positions)))
    per_radian = np.array([theta ** np.float64(each) for each in exponents]).astype(np.float32)  # the C library's pow
    if rotary.long is not None:
        divisors = rotary.long[1] if num_positions > rotary.long[0] else rotary.divisors
        return 1 / (np.array(divisors, FLOAT32) * per_radian)
    found = _scaled(rotary, per_radian)
    return found if rotary.divisors is None else found / np.array(rotary.divisors, FLOAT32)


def _theta(rotary: Rotary, num_positions: int) -> float:
    if rotary.dynamic is None or num_positions <= rotary.dynamic[0]:
        return rotary.theta
    (original, factor), head_dim = rotary.dynamic, rotary.head_dim
    stretched: float = (factor * rotary.max_positions / original - (factor - 1)) ** (head_dim / (head_dim - 2))
    return rotary.theta * stretched


def _scaled(rotary: Rotary, per_radian: Array) -> Array:
    if rotary.ramp is not None:
        return _interpolated(rotary, per_radian, *rotary.ramp)
    if rotary.turns is not None:
        return _slowed_down(rotary, 1 / per_radian, *rotary.turns)
    return 1 / per_radian / rotary.factor


def _slowed_down(rotary: Rotary, inv_freq: Array, original: float, low: float, high: float) -> Array:
    """Llama 3.1: pairs that turn fewer than `low` times in the original length slowed down, more than `high` kept."""
    wavelength = 2 * math.pi * (1 / inv_freq)  # rounded twice, as by PyTorch
    smooth = (original * (1 / wavelength) - low) / (high - low)
    ramp = (1 - smooth) * inv_freq / rotary.factor + smooth * inv_freq
    scaled = np.where(wavelength > original / low, inv_freq / rotary.factor, ramp)
    return np.where(wavelength < original / high, inv_freq, scaled)


def _interpolated(rotary: Rotary, per_radian: Array, first: float, last: float) -> Array:
    """YaRN: pairs before `first` kept, after `last` interpolated."""
    width = last - first or 0.001  # a ramp of one point: anything small, as in the original
    ramp = ((np.arange(len(per_radian), dtype=np.float32) - first) / width).clip(0, 1)
    kept = 1 - ramp
    interpolated: Array = 1 / (rotary.factor * per_radian) * (1 - kept) + 1 / per_radian * kept
    return interpolated
