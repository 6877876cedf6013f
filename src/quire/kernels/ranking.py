"""The order of a row's tokens: higher logit first, equal logits by token id. One definition for filters and for ranks.

Sorting by float leaves the order of equal logits to the library. Packing the logit and the id into one integer leaves
nothing open: no two keys of a row are equal.
"""

import numpy as np
import torch
from torch import Tensor

_ID_MASK = 0xFFFFFFFF


def order_keys(logits: Tensor) -> Tensor:
    """Return int64 keys [..., vocab] in whose descending order the tokens of float32 `logits` [..., vocab] rank.

    The bits of a float32 read as an integer rise with it if it is positive, fall if negative: flipping the latter's
    lower bits makes them rise everywhere. Adding 0 turns -0.0 into 0.0, which it equals.
    """
    bits = (logits + 0.0).view(torch.int32)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return (rising.long() << 32) | (_ID_MASK - ids)


def top_tokens(keys: Tensor, count: int) -> Tensor:
    """Return the ids [count] of the `count` first tokens, in order.

    NumPy sorts integers with vector instructions: 32,000 keys in 0.2 ms, where PyTorch takes 9.
    """
    best = keys if count == len(keys) else keys.topk(count, sorted=False).values
    ranked = np.sort(best.numpy(force=True))[::-1].copy()
    return _ID_MASK - (torch.from_numpy(ranked).to(keys.device) & _ID_MASK)


def rank(keys: Tensor, token: int) -> int:
    """Return the rank of a token, from 1."""
    return int((keys > keys[token]).sum()) + 1
