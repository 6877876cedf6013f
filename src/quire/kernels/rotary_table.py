"""Rotary tables, by the extension: the same bits on every machine (docs/decisions/0032)."""

import numpy as np

from quire.core.arrays import FLOAT32, Array, address, empty
from quire.kernels.cpp.isas import usable_isas

POSITIONS_AT_ONCE = 1 << 12  # so that what is needed on the way stays small beside the table


def rotary_table(frequencies: Array, num_positions: int, scale: float = 1.0) -> Array:
    """Return cosines and sines of every position, float32 [num_positions, rotary_dim]: cosines first, then sines.

    frequencies float32 [rotary_dim / 2], radians per position; `scale` multiplies both (YaRN's attention factor).
    An angle is rounded to float32, as models are trained; the rest is computed in double and rounded once.
    """
    assert (frequencies.dtype, frequencies.flags.c_contiguous) == (FLOAT32, True), "frequencies of another form"
    half = len(frequencies)
    table = empty((num_positions, 2 * half), FLOAT32)
    if usable_isas():
        from quire.kernels.cpp import _kernels  # noqa: PLC0415 (the extension is optional)

        _kernels.rotary_table(address(frequencies), half, num_positions, scale, address(table))
        return table
    for begin in range(0, num_positions, POSITIONS_AT_ONCE):
        some = slice(begin, min(begin + POSITIONS_AT_ONCE, num_positions))
        angles = np.outer(np.arange(some.start, some.stop, dtype=np.float32), frequencies).astype(np.float64)
        table[some, :half], table[some, half:] = np.cos(angles) * scale, np.sin(angles) * scale
    return table
