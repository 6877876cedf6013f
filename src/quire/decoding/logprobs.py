"""Logprobs of tokens and of their likeliest rivals: log-softmax of the raw float32 logits, before any edit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.core.outputs import TokenLogprobs
from quire.decoding.ranking import order_keys, ranks, row_chunks, top_tokens


def token_logprobs(logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return for each row its token, then the `counts[i]` most likely ones in order (the token again, if it is one).

    logits float32 [num, vocab]; tokens int64 [num]; counts at most the vocabulary's size.
    """
    records: list[TokenLogprobs] = []
    for rows in row_chunks(*logits.shape):
        records += _chunk_logprobs(logits[rows], tokens[rows], counts[rows])
    return records


def _chunk_logprobs(logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return the records of rows that are few enough to hold several copies of."""
    keys = order_keys(logits)
    ids = torch.cat([tokens[:, None], top_tokens(keys, max(counts))], dim=1)  # [num, 1 + max(counts)]
    values = logits.log_softmax(dim=1).gather(1, ids).tolist()
    own_ranks = ranks(keys, tokens).tolist()
    return [
        TokenLogprobs(row[: count + 1], row_values[: count + 1], [rank, *range(1, count + 1)])
        for row, row_values, rank, count in zip(ids.tolist(), values, own_ranks, counts, strict=True)
    ]
