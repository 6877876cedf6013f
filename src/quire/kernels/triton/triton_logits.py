"""Edits and logprobs of logits on the device; the meanings are those of `quire.kernels.reference`.

A mask is a kernel of Triton's: one program takes BLOCK tokens of one row. A word of bits for 32 logits is read,
forbidden logits are written, and the others are not touched, so a row takes at most 4 bytes of writes and 1/8 byte of
reads per token. Logprobs and penalties are PyTorch's own kernels, all rows at once: few rows ask for them.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.reference.sampling import order_keys, upload
from quire.kernels.sampling import Penalties, TopLogprobs, empty_logprobs, num_words

BLOCK = 4096
ROWS_AT_ONCE = 32  # 32 x 150,000 tokens x 8 bytes are 38 MB


def top_logprobs(
    logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64], counts: NDArray[np.int64]
) -> TopLogprobs:
    """Return what `ranking.top_logprobs` returns; waits for the device."""
    answer, device = empty_logprobs(counts), logits.device
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        end = begin + ROWS_AT_ONCE
        some = logits[upload(rows[begin:end], device)]
        own = upload(tokens[begin:end], device)[:, None]
        count = int(counts[begin:end].max(initial=0))
        keys = order_keys(some)
        ids = torch.cat([own, keys.topk(count, dim=1).indices], dim=1)
        ranks = torch.arange(count + 1, device=device).repeat(len(some), 1)
        ranks[:, :1] = (keys > keys.gather(1, own)).sum(1, keepdim=True) + 1
        answer.token_ids[begin:end, : count + 1] = ids.numpy(force=True)
        answer.logprobs[begin:end, : count + 1] = some.log_softmax(dim=1).gather(1, ids).numpy(force=True)
        answer.ranks[begin:end, : count + 1] = ranks.numpy(force=True)
    return answer


def penalize(logits: Tensor, penalties: Penalties) -> None:
    """Edit what `logits.penalize` edits."""
    logit_rows, token_ids, token_rows, num_tokens, num_prompt_tokens, repetition, presence, frequency = penalties
    device, vocab_size = logits.device, logits.shape[1]
    for begin in range(0, len(logit_rows), ROWS_AT_ONCE):
        chosen = slice(begin, begin + ROWS_AT_ONCE)
        ends = num_tokens[chosen]
        known = [token_ids[row, :end] for row, end in zip(token_rows[chosen], ends, strict=True)]
        owners = np.repeat(np.arange(len(known)), ends)
        is_output = np.concatenate(
            [np.arange(end) >= first for end, first in zip(ends, num_prompt_tokens[chosen], strict=True)]
        )
        places = upload(owners * vocab_size + np.concatenate(known), device)
        flags = upload(is_output.astype(np.int32), device)
        times = torch.zeros(len(known) * vocab_size, dtype=torch.int32, device=device)
        is_known = torch.zeros(len(known) * vocab_size, dtype=torch.bool, device=device)
        times.index_add_(0, places, flags)
        is_known[places] = True
        times, is_known = times.view(len(known), -1), is_known.view(len(known), -1)
        rows = upload(logit_rows[chosen], device)
        by_row = (upload(x[chosen].copy(), device)[:, None] for x in (repetition, frequency, presence))
        factor, per_time, once = by_row
        some = logits[rows]
        repeated = torch.where(some > 0, some / factor, some * factor)
        logits[rows] = torch.where(is_known, repeated - per_time * times - once * (times > 0), some)


def mask_logits(logits: Tensor, rows: NDArray[np.int64], bits: NDArray[np.uint32]) -> None:
    """Edit what `logits.mask_logits` edits, without waiting for the device."""
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
