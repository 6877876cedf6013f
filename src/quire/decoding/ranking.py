"""The order of tokens: higher logit first, equal logits by token id. One definition for filters and for ranks.

Sorting by float leaves the order of equal logits to the library and to the shape of the batch. Packing the logit and
the id into one integer leaves nothing open: no two keys of a row are equal.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_ID_MASK = 0xFFFFFFFF
# 8 MiB of keys or of float64 at a time, whatever the batch. At 4 times as much every copy is fresh memory from the
# kernel: 32 rows of 151,936 took 94 ms instead of 28 to draw for.
_MAX_CHUNK_ELEMENTS = 1 << 20


def order_keys(logits: Tensor) -> Tensor:
    """Return int64 keys [num, vocab] in whose descending order the tokens of float32 `logits` [num, vocab] rank.

    The bits of a float32 read as an integer rise with it if it is positive, fall if negative: flipping the latter's
    lower bits makes them rise everywhere. Adding 0 turns -0.0 into 0.0, which it equals.
    """
    bits = (logits + 0.0).view(torch.int32)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (rising.long() << 32) | (_ID_MASK - ids)


def top_tokens(keys: Tensor, count: int) -> Tensor:
    """Return the ids [num, count] of the `count` first tokens, in order; all tokens when `count` is the vocabulary."""
    best = keys.topk(count).values if count < keys.shape[1] else keys.sort(dim=1, descending=True).values
    return _ID_MASK - (best & _ID_MASK)


def ranks(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return the rank [num], from 1, of one token [num] in each row."""
    return (keys > keys.gather(1, tokens[:, None])).sum(dim=1) + 1


def row_chunks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Cut a batch into runs of rows whose keys fit into little memory."""
    step = max(1, _MAX_CHUNK_ELEMENTS // vocab_size)
    return (slice(start, start + step) for start in range(0, num_rows, step))
