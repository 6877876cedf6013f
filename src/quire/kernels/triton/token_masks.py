"""Token masks in Triton: the meaning is `quire.kernels.token_masks.mask_logits`'s.

One program takes BLOCK tokens of one row: a word of bits for 32 logits is read, forbidden logits are written, and the
others are not touched, so a row takes at most 4 bytes of writes and 1/8 byte of reads per token.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.token_masks import num_words
from quire.kernels.upload import upload

BLOCK = 4096


def mask_logits(logits: Tensor, rows: NDArray[np.int64], bits: NDArray[np.uint32]) -> None:
    """Edit what `token_masks.mask_logits` edits, without waiting for the device."""
    if not len(rows):
        return
    vocab_size = logits.shape[1]
    assert logits.dtype == torch.float32, f"logits {logits.dtype}"
    assert logits.stride(1) == 1, "logits with gaps"
    assert bits.shape[1] >= num_words(vocab_size), f"{bits.shape[1]} words for {vocab_size} tokens"
    words = upload(np.ascontiguousarray(bits).view(np.int32), logits.device)
    block = min(BLOCK, triton.next_power_of_2(vocab_size))
    _mask_kernel[(len(rows), triton.cdiv(vocab_size, block))](
        logits, upload(rows, logits.device), words, vocab_size, logits.stride(0), words.stride(0), BLOCK=block
    )


@triton.jit
def _mask_kernel(all_logits, rows, words, vocab_size, stride, num_words, BLOCK: tl.constexpr):
    """BLOCK tokens of one row."""
    entry = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(words + entry.to(tl.int64) * num_words + ids // 32, mask=ids < vocab_size, other=-1)
    is_forbidden = ((bits >> (ids % 32)) & 1) == 0
    row = all_logits + tl.load(rows + entry) * stride
    tl.store(row + ids, float("-inf"), mask=is_forbidden & (ids < vocab_size))
