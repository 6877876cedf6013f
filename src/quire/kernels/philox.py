"""Philox4x32-10: a random generator without state (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

A block cipher with ten rounds turns (key, counter) into 128 random bits. The key is a branch's seed, the counter the
index of the output token, so a draw is the same at any time, in any order and in any batch.
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_KEY_STEPS = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)  # golden ratio, square root of 3 less 1
_NUM_ROUNDS = 10
_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)
_SHIFT_TO_53_BITS = np.uint64(11)


def philox4x32(counters: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return four random words for each counter.

    counters [num, 4] and keys [num, 2] hold words of 32 bits, kept in uint64 so that a product of two fits; the result
    [num, 4] likewise.
    """
    words, keys = counters.T, keys.T  # [4, num], [2, num]
    for _ in range(_NUM_ROUNDS):
        products = words[0::2] * _MULTIPLIERS[:, None]  # [2, num]
        high, low = products >> _SHIFT_32, products & _LOW_32
        words = np.stack([high[1] ^ words[1] ^ keys[0], low[1], high[0] ^ words[3] ^ keys[1], low[0]])
        keys = (keys + _KEY_STEPS[:, None]) & _LOW_32
    return words.T


def uniforms(seeds: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, index): 53 bits, all that a float64 below 1 can hold evenly.

    seeds [num] are the key, indices [num], at least 0, the counter's low half. The number is made of the first two
    words, the first one low.
    """
    keys = np.stack([seeds & _LOW_32, seeds >> _SHIFT_32], axis=1)
    counters = np.zeros((len(indices), 4), dtype=np.uint64)
    counters[:, 0] = indices.astype(np.uint64) & _LOW_32
    counters[:, 1] = indices.astype(np.uint64) >> _SHIFT_32
    words = philox4x32(counters, keys)
    bits = (words[:, 0] | words[:, 1] << _SHIFT_32) >> _SHIFT_TO_53_BITS
    return bits.astype(np.float64) * 2.0**-53
