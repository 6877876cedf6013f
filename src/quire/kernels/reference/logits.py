"""Edits of logits in place: masks of tokens that rows may draw, and penalties on tokens that they have."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.logits import Penalties


def mask_logits(logits: Tensor, rows: NDArray[np.int64], bits: NDArray[np.uint32]) -> None:
    """Set the logits of forbidden tokens to minus infinity, in place, in some rows of float32 [num_rows, vocab].

    rows int64 [num], no row twice; bits uint32 [num, num_words], at least `num_words(vocab)`: token t of row rows[i]
    is allowed if bit t % 32 of bits[i, t // 32] is set.
    """
    as_bytes = np.ascontiguousarray(bits).astype("<u4", copy=False).view(np.uint8)
    for row, own in zip(rows.tolist(), as_bytes, strict=True):
        is_forbidden = np.unpackbits(own, count=logits.shape[1], bitorder="little") == 0
        logits[row].masked_fill_(torch.from_numpy(is_forbidden).to(logits.device), -torch.inf)


def penalize(logits: Tensor, penalties: Penalties) -> None:
    """Edit some rows of float32 `logits` [num_rows, vocab] in place.

    repetition (Keskar et al. 2019): the logit of a known token is divided by it if positive, multiplied by it
    otherwise. Then frequency is subtracted for each occurrence of the token in the output, and presence once if it
    does (OpenAI's definitions).
    """
    logit_rows, token_ids, token_rows, num_tokens, num_prompt_tokens, repetition, presence, frequency = penalties
    for i, row in enumerate(logit_rows.tolist()):
        known, places = np.unique(token_ids[token_rows[i], : num_tokens[i]], return_inverse=True)
        counts = np.bincount(places[num_prompt_tokens[i] :], minlength=len(known)).astype(np.float32)
        where, times = torch.from_numpy(known.astype(np.int64)).to(logits.device), torch.from_numpy(counts).to(logits)
        values = logits[row, where]
        values = torch.where(values > 0, values / float(repetition[i]), values * float(repetition[i]))
        logits[row, where] = values - float(frequency[i]) * times - float(presence[i]) * (times > 0)


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on `device`, without waiting for what the device computes; on the CPU as it is.

    It goes by way of pinned memory, which PyTorch does not reuse before the transfer has ended.
    """
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)


Entries = tuple[Tensor, Tensor]  # row and token of each, both int64 [num], where the logits are


def keep_tokens(logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
    """Set all other logits of these rows to minus infinity."""
    places = _entries(logits, rows, tokens)
    kept = logits[places]
    logits.index_fill_(0, upload(np.unique(rows), logits.device), -torch.inf)
    logits[places] = kept


def forbid_tokens(logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
    """Set logits to minus infinity."""
    logits[_entries(logits, rows, tokens)] = -torch.inf


def forbid_while_any_is_left(logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
    """Set logits to minus infinity, except in rows that would have no other left; without waiting for the device."""
    places = _entries(logits, rows, tokens)
    before = logits[places]
    logits[places] = -torch.inf
    edited = upload(np.unique(rows), logits.device)
    is_relaxed = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    is_relaxed[edited] = logits[edited].amax(dim=1) == -torch.inf
    logits[places] = torch.where(is_relaxed[places[0]], before, -torch.inf)


def add_bias(
    logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64], values: NDArray[np.float32]
) -> None:
    """Add values to logits."""
    places = _entries(logits, rows, tokens)
    logits[places] = logits[places] + upload(values, logits.device)


def _entries(logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> Entries:
    return upload(rows, logits.device), upload(tokens, logits.device)
