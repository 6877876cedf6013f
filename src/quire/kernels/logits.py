"""Edits of logits in host memory: tokens that rows may draw, or may not, and what penalties on tokens are made of.

Edits are in place, of entries (rows[i], tokens[i]) of float32 logits [num_rows, vocab], both int64 [num]; no entry is
named twice, and those of a row stand together.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    """Add values to logits."""
    logits[rows, tokens] += values
