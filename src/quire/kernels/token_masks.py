"""Token masks: bits that say which tokens a row may draw, applied to its logits."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORD_BITS = 32


def num_words(vocab_size: int) -> int:
    """Return how many words of 32 bits hold one bit per token."""
    return -(-vocab_size // WORD_BITS)


def mask_logits(logits: Tensor, rows: NDArray[np.int64], bits: NDArray[np.uint32]) -> None:
    """Set the logits of forbidden tokens to minus infinity, in place, in some rows of float32 [num_rows, vocab].

    rows int64 [num], no row twice; bits uint32 [num, num_words], at least `num_words(vocab)`: token t of row rows[i]
    is allowed if bit t % 32 of bits[i, t // 32] is set.
    """
    as_bytes = np.ascontiguousarray(bits).astype("<u4", copy=False).view(np.uint8)
    for row, own in zip(rows.tolist(), as_bytes, strict=True):
        is_forbidden = np.unpackbits(own, count=logits.shape[1], bitorder="little") == 0
        logits[row].masked_fill_(torch.from_numpy(is_forbidden).to(logits.device), -torch.inf)
