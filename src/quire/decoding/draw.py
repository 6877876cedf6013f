"""Draw one token per row: temperature, min_p, top_k, top_p, then the inverse of the cumulative distribution.

Exact in every row whatever the batch. Softmax works on one row at a time, in an order that its length alone decides
(tested); sums run in float64 one after the other, in the order of ranks or of ids, so tokens of no weight and columns
past a row's candidates change nothing; everything else is elementwise.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.decoding.ranking import order_keys, row_chunks, top_tokens

# How many candidates to rank before ranking everything. Most nuclei hold a few tokens. One row of 151,936 costs 0.3,
# 0.7, 3 and 13 ms at the three counts and in full, on one core. Which one settles a row does not change its token.
_CANDIDATE_COUNTS = (64, 1024, 16384)


def draw(logits: Tensor, settings: NDArray[np.void], uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return a token for each row.

    logits float32 [num, vocab]; settings ROW_DTYPE [num]; uniforms [num] in [0, 1). A row of NaN gives some token.
    """
    tokens = np.empty(len(logits), dtype=np.int64)
    for rows in row_chunks(*logits.shape):
        tokens[rows] = _draw_chunk(logits[rows], settings[rows], uniforms[rows])
    return tokens


def _draw_chunk(logits: Tensor, settings: NDArray[np.void], uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
    """Draw for rows that are few enough to hold several copies of."""
    weights = _probabilities(logits, settings)
    is_cut = (settings["top_k"] < logits.shape[1]) | (settings["top_p"] < 1)
    tokens = np.empty(len(logits), dtype=np.int64)
    whole, cut = np.flatnonzero(~is_cut), np.flatnonzero(is_cut)
    if whole.size:
        tokens[whole] = _invert(_take(weights, whole).double(), uniforms[whole]).numpy(force=True)
    if cut.size:
        keys = order_keys(_take(logits, cut))
        tokens[cut] = _draw_cut(keys, _take(weights, cut), settings[cut], uniforms[cut])
    return tokens


def _probabilities(logits: Tensor, settings: NDArray[np.void]) -> Tensor:
    """Return softmax(logits / temperature) [num, vocab], 0 for tokens below min_p of the most likely one's.

    The highest logit is taken off first, so that no division overflows but to minus infinity.
    """
    scaled = logits - logits.amax(dim=1, keepdim=True)
    scaled /= _column(logits, settings["temperature"])
    log_min_p = settings["log_min_p"]
    if (log_min_p > -np.inf).any():
        scaled.masked_fill_(scaled < _column(logits, log_min_p), -torch.inf)
    return scaled.softmax(dim=1)


def _draw_cut(
    keys: Tensor, weights: Tensor, settings: NDArray[np.void], uniforms: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Draw for rows with top_k or top_p, ranking more and more candidates until each row has all that it keeps.

    keys [num, vocab] rank the tokens; weights [num, vocab] are their probabilities.
    """
    vocab_size = keys.shape[1]
    tokens = np.empty(len(keys), dtype=np.int64)
    pending = np.arange(len(keys))
    for count in (*(count for count in _CANDIDATE_COUNTS if count < vocab_size), vocab_size):
        ids = top_tokens(_take(keys, pending), count)
        kept, is_settled = _cut(_take(weights, pending).gather(1, ids), settings[pending], vocab_size)
        done = np.flatnonzero(is_settled)
        if done.size:
            tokens[pending[done]] = _draw_of(_take(ids, done), _take(kept, done), uniforms[pending[done]])
        pending = pending[~is_settled]
        if not pending.size:
            break
    return tokens


def _cut(ranked: Tensor, settings: NDArray[np.void], vocab_size: int) -> tuple[Tensor, NDArray[np.bool_]]:
    """Zero what top_k and then top_p drop from `ranked` [num, count], probabilities of the first tokens in order.

    top_p keeps the fewest tokens whose share of what top_k left reaches it, at least one. Returns the kept weights,
    float64, and for which rows `count` candidates were enough to tell.
    """
    count = ranked.shape[1]
    top_k, top_p = _column(ranked, settings["top_k"]), _column(ranked, settings["top_p"])
    in_top_k = torch.arange(count, device=ranked.device) < top_k
    weights = ranked.double() * in_top_k
    sums = weights.cumsum(dim=1)
    total = torch.where(top_k < vocab_size, sums[:, -1:], 1.0)  # of all tokens, softmax makes it 1
    limit = torch.where(top_p < 1, top_p * total, torch.inf)
    weights[:, 1:] *= sums[:, :-1] < limit
    has_all = (top_k <= count) | ((top_k == vocab_size) & (sums[:, -1:] >= limit))
    return weights, has_all[:, 0].numpy(force=True)


def _draw_of(ids: Tensor, weights: Tensor, uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
    """Draw from candidates `ids` [num, count] with `weights` [num, count], in the order of ids."""
    ids, order = ids.sort(dim=1)
    index = _invert(weights.gather(1, order), uniforms)
    return ids.gather(1, index[:, None])[:, 0].numpy(force=True)


def _invert(weights: Tensor, uniforms: NDArray[np.float64]) -> Tensor:
    """Return the first index [num] at which the running sum of float64 `weights` [num, count] passes uniform * total.

    A uniform of 53 bits times a total rounds to less than the total, so the index is always one of positive weight.
    """
    sums = weights.cumsum(dim=1)
    target = sums[:, -1:] * _column(weights, uniforms)
    return torch.searchsorted(sums, target, right=True)[:, 0].clamp_(max=weights.shape[1] - 1)


def _column(like: Tensor, values: NDArray[np.generic]) -> Tensor:
    """Return one value per row as [num, 1], on the device of `like`."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)[:, None]


def _take(tensor: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """Return some rows of a tensor, without a copy when they are all of them; `rows` ascend."""
    return tensor if len(rows) == len(tensor) else tensor[torch.from_numpy(rows).to(tensor.device)]
