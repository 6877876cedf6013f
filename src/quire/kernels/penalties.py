"""Repetition, presence and frequency penalties on rows of logits."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Penalties(NamedTuple):
    """Penalties of some rows of logits. Every field but `token_ids` is [num].

    Entry i edits row logit_rows[i], no row twice. Its known tokens are the first num_tokens[i] of row token_rows[i] of
    `token_ids`, prompt and output.
    """

    logit_rows: NDArray[np.int64]
    token_ids: NDArray[np.int32]  # [max_rows, max_len]
    token_rows: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    num_prompt_tokens: NDArray[np.int64]
    repetition: NDArray[np.float32]
    presence: NDArray[np.float32]
    frequency: NDArray[np.float32]


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
