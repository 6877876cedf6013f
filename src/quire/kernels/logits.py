"""Edits of logits: masks of tokens that rows may draw, and penalties on tokens that they have."""


from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
