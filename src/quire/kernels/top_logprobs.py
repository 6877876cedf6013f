"""Logprobs of one token per row and of its likeliest rivals: log-softmax of float32 logits."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.ranking import order_keys, rank, top_tokens


class TopLogprobs(NamedTuple):
    """Arrays [num, 1 + max(counts)]: a row's token, then its likeliest, in order; behind those, nothing is said."""

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int64]  # from 1


def empty(counts: NDArray[np.int64]) -> TopLogprobs:
    """Return room for the answer."""
    shape = (len(counts), 1 + int(counts.max(initial=0)))
    return TopLogprobs(np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.zeros(shape, np.int64))


def top_logprobs(
    logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64], counts: NDArray[np.int64]
) -> TopLogprobs:
    """Return the logprobs of `tokens[i]` and of the `counts[i]` most likely tokens in row `rows[i]`.

    logits float32 [num_rows, vocab]; rows, tokens and counts [num]; a count is at most the vocabulary's size.
    """
    answer = empty(counts)
    for i, (row, token, count) in enumerate(zip(rows.tolist(), tokens.tolist(), counts.tolist(), strict=True)):
        keys = order_keys(logits[row])
        ids = torch.cat([torch.tensor([token], device=keys.device), top_tokens(keys, count)])
        answer.token_ids[i, : count + 1] = ids.numpy(force=True)
        answer.logprobs[i, : count + 1] = logits[row].log_softmax(dim=0)[ids].numpy(force=True)
        answer.ranks[i, : count + 1] = [rank(keys, token), *range(1, count + 1)]
    return answer
