"""Token sampling: settings of a row's draw, edits of logits, random numbers, and the ops of a back end.

Edits are in place, of entries (rows[i], tokens[i]) of float32 logits [num_rows, vocab], both int64 [num]; no entry is
named twice, and those of a row stand together.

A block cipher with ten rounds turns (key, counter) into 128 random bits. The key is a branch's seed, the counter the
index of the output token, so a draw is the same at any time, in any order and in any batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.kernels.tensors import Tensor

FEW_TOKENS = 64
WORD_BITS = 32  # tokens of a word of a mask


def num_words(vocab_size: int) -> int:
    """Return how many words of 32 bits hold one bit per token."""
    return -(-vocab_size // WORD_BITS)


class Penalties(NamedTuple):
    """Penalties of some rows of logits. Every field but `token_ids` is [num].

    Entry i edits row logit_rows[i], no row twice. Its known tokens are the first num_tokens[i] of row token_rows[i] of
    `token_ids`, prompt and output.
    """

    logit_rows: NDArray[np.int64]
    token_ids: NDArray[np.int32]  # [max_rows, max_len]
    token_rows: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    num_prompt_tokens: NDArray[np.int64]
    repetition: NDArray[np.float32]
    presence: NDArray[np.float32]
    frequency: NDArray[np.float32]


def keep_tokens(logits: NDArray[np.float32], rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
    """Set all other logits of these rows to minus infinity."""
    kept = logits[rows, tokens]
    logits[np.unique(rows)] = -np.inf
    logits[rows, tokens] = kept


def forbid_tokens(logits: NDArray[np.float32], rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
    """Set logits to minus infinity."""
    logits[rows, tokens] = -np.inf


def forbid_while_any_is_left(logits: NDArray[np.float32], rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
    """Set logits to minus infinity, except in rows that would have no other logit left."""
    before = logits[rows, tokens]
    logits[rows, tokens] = -np.inf
    edited = np.unique(rows)
    edited = edited[logits[:, :FEW_TOKENS][edited].max(axis=1) == -np.inf]  # most rows have a finite one among these
    relaxed = edited[logits[edited].max(axis=1) == -np.inf]
    if relaxed.size:
        is_relaxed = np.isin(rows, relaxed)
        logits[rows[is_relaxed], tokens[is_relaxed]] = before[is_relaxed]


def add_bias(
    logits: NDArray[np.float32], rows: NDArray[np.int64], tokens: NDArray[np.int64], values: NDArray[np.float32]
) -> None:
    """Add values[i] to logits[rows[i], tokens[i]] in place; no place may be named twice."""
    logits[rows, tokens] += values


SETTINGS = np.dtype([          # a row's draw, 32 bytes
    ("top_ps", np.float64),       # 1 is off
    ("uniforms", np.float64),     # [0, 1)
    ("temperatures", np.float32),  # 0: the highest logit, and nothing else counts
    ("log_min_ps", np.float32),   # minus infinity is off
    ("top_ks", np.int64),         # from 1; the vocabulary's size is off
])  # fmt: skip


Tokens = Any  # one per row; a tensor where the device has yet to choose them


Edit = Callable[[Tensor, NDArray[np.int64], NDArray[np.int64]], None]  # as in `logits`: of (row, token) entries


class TopLogprobs(NamedTuple):
    """Arrays [num, 1 + max(counts)]: a row's token, then its likeliest, in order; behind those, nothing is said."""

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int64]  # from 1


def empty_logprobs(counts: NDArray[np.int64]) -> TopLogprobs:
    """Return room for the answer."""
    shape = (len(counts), 1 + int(counts.max(initial=0)))
    return TopLogprobs(np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.zeros(shape, np.int64))


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """One implementation of each op of sampling; fields have the signatures of `reference.sampling.SAMPLING`'s."""

    choose_tokens: Callable[..., Tokens]
    uniforms: Callable[[NDArray[np.uint64], NDArray[np.int64]], NDArray[np.float64]]
    top_logprobs: Callable[..., TopLogprobs]
    penalize: Callable[[Tensor, Penalties], None]
    mask_logits: Callable[[Tensor, NDArray[np.int64], NDArray[np.uint32]], None]
    keep_tokens: Edit
    forbid_tokens: Edit
    forbid_while_any_is_left: Edit
    add_bias: Callable[[Tensor, NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]], None]


def pack_settings(draws: NDArray[np.void]) -> NDArray[np.float64]:
    """Return SETTINGS [num_rows] as one table [num_rows, 4], which a device is sent in one piece."""
    return draws.view(np.float64).reshape(-1, 4)


_NUM_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)  # golden ratio, square root of 3 less 1
_KEY_STEPS_BY_ROUND = np.arange(_NUM_ROUNDS, dtype=np.uint64)[:, None, None] * _KEY_STEPS  # [_NUM_ROUNDS, 2, 1]
_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)
_SHIFT_TO_53_BITS = np.uint64(11)


def philox4x32(counters: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return four random words for each counter.

    counters [num, 4] and keys [num, 2] hold words of 32 bits, kept in uint64 so that a product of two fits; the result
    [num, 4] likewise.
    """
    even, odd = _rounds(counters.T[0::2], counters.T[1::2], keys.T)
    return np.stack([even[0], odd[0], even[1], odd[1]], axis=1)


def _rounds(
    even: NDArray[np.uint64], odd: NDArray[np.uint64], keys: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the even and the odd words of the result for those of the counters, and for keys, all [2, num].

    By pairs, since with few rows a call of NumPy takes longer than what it computes.
    """
    for key in (keys + _KEY_STEPS_BY_ROUND) & _LOW_32:
        products = (even * _MULTIPLIERS)[::-1]
        even, odd = (products >> _SHIFT_32) ^ odd ^ key, products & _LOW_32
    return even, odd


def uniforms(seeds: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, index): 53 bits, all that a float64 below 1 can hold evenly.

    seeds [num] are the key, indices [num], at least 0, the counter's low half. The number is made of the first two
    words, the first one low.
    """
    counters, keys = np.zeros((2, 2, len(indices)), dtype=np.uint64), np.empty((2, len(indices)), dtype=np.uint64)
    for halves, words in ((counters[:, 0], indices.astype(np.uint64)), (keys, seeds)):
        halves[0], halves[1] = words & _LOW_32, words >> _SHIFT_32
    even, odd = _rounds(counters[0], counters[1], keys)
    bits = (even[0] | odd[0] << _SHIFT_32) >> _SHIFT_TO_53_BITS
    numbers: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers
