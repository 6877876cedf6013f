"""Token sampling: per row the highest logit, or a draw by temperature, min_p, top_k, top_p.

A row is computed by itself, so its token is the same whatever the batch: softmax in an order that its length alone
decides (tested), sums in float64 one after the other.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.philox import uniforms
from quire.kernels.reference.logits import (
    add_bias,
    forbid_tokens,
    forbid_while_any_is_left,
    keep_tokens,
    mask_logits,
    penalize,
)
from quire.kernels.reference.ranking import order_keys, top_logprobs, top_tokens
from quire.kernels.sampling import SETTINGS, SamplingOps


def unpack_settings(table: Tensor) -> NDArray[np.void]:
    """Return the settings that `pack_settings` has packed."""
    return table.numpy(force=True).view(SETTINGS)[:, 0]


def choose_tokens(logits: Tensor, draws: NDArray[np.void] | Tensor | None = None) -> NDArray[np.int64]:
    """Return a token for each row [num_rows] of float32 logits [num_rows, vocab].

    `draws` are SETTINGS [num_rows], or a tensor of `pack_settings` where the logits are. Without them it is the token
    of the highest logit; of equal ones, the lowest id; of NaN, the first. Drawn is the first at which the running sum
    of probabilities, over the kept tokens in the order of ids, passes uniform * their total. A row with NaN or infinity
    has none: the highest logit.
    """
    tokens = _argmax(logits)
    if draws is None:
        return tokens
    draws = unpack_settings(draws) if isinstance(draws, Tensor) else draws
    is_sound = logits.amax(dim=1).isfinite().numpy(force=True)
    for row in np.flatnonzero((draws["temperatures"] > 0) & is_sound).tolist():
        top_p, uniform, temperature, log_min_p, top_k = draws[row].item()
        weights = _probabilities(logits[row], temperature, log_min_p)
        if top_k == len(weights) and top_p == 1:
            tokens[row] = _invert(weights, uniform)
            continue
        ids = _cut(logits[row], weights, top_k, top_p).sort().values
        tokens[row] = ids[_invert(weights[ids], uniform)]
    return tokens


def _argmax(logits: Tensor) -> NDArray[np.int64]:
    """Both libraries promise the first of equal ones. On a CPU NumPy takes 0.07 ms for 256 rows of 4,096, torch 0.9 on
    one thread and more when its threads wait for each other.
    """
    if logits.device.type == "cpu":
        first: NDArray[np.int64] = logits.numpy().argmax(axis=1)
        return first
    return logits.argmax(dim=1).numpy(force=True)


def _probabilities(logits: Tensor, temperature: float, log_min_p: float) -> Tensor:
    """Return softmax(logits / temperature) [vocab], 0 for tokens below min_p of the most likely one's.

    The highest logit is taken off first, so that no division overflows but to minus infinity.
    """
    scaled = (logits - logits.amax()) / temperature
    if log_min_p > -np.inf:
        scaled.masked_fill_(scaled < log_min_p, -torch.inf)
    return scaled.softmax(dim=0)


def _cut(logits: Tensor, weights: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return the tokens [num] that top_k and then top_p keep, in the order of `ranking`.

    top_p keeps the fewest tokens that reach this share of what top_k left, at least one. Only what may be kept is
    ranked: tokens that weigh less than half of (1 - top_p) / vocab each weigh less than 1 - top_p together.
    """
    is_top_k = top_k < len(logits)
    if is_top_k:
        may_be_kept = logits >= float(np.partition(logits.numpy(force=True), -top_k)[-top_k])
    else:
        may_be_kept = weights >= (1 - top_p) / 2 / len(logits)
    ids = may_be_kept.nonzero()[:, 0]
    ids = ids[top_tokens(order_keys(logits[ids]), min(top_k, len(ids)))]
    if top_p == 1:
        return ids
    sums = weights[ids].double().cumsum(dim=0)
    total = float(sums[-1]) if is_top_k else 1.0  # softmax makes the sum over all tokens 1
    return ids[: 1 + int((sums[:-1] < top_p * total).sum())]


def _invert(weights: Tensor, uniform: float) -> int:
    """Return the first index at which the running sum of `weights` [num] passes uniform * total, in float64.

    A uniform of 53 bits times a total rounds to less than the total, so the index is always one of positive weight.
    """
    sums = weights.double().cumsum(dim=0)
    return min(int(torch.searchsorted(sums, sums[-1:] * uniform, right=True)), len(weights) - 1)


SAMPLING = SamplingOps(
    choose_tokens=choose_tokens,
    uniforms=uniforms,
    top_logprobs=top_logprobs,
    penalize=penalize,
    mask_logits=mask_logits,
    keep_tokens=keep_tokens,
    forbid_tokens=forbid_tokens,
    forbid_while_any_is_left=forbid_while_any_is_left,
    add_bias=add_bias,
)
