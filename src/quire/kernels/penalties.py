"""Repetition, presence and frequency penalties on rows of logits."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def penalize(
    logits: Tensor,
    logit_rows: NDArray[np.int64],
    token_ids: NDArray[np.int32],
    token_rows: NDArray[np.int64],
    num_tokens: NDArray[np.int64],
    num_prompt_tokens: NDArray[np.int64],
    repetition: NDArray[np.float32],
    presence: NDArray[np.float32],
    frequency: NDArray[np.float32],
) -> None:
    """Edit some rows of float32 `logits` [num_rows, vocab] in place.

    Entry i edits row logit_rows[i], no row twice. Its known tokens are the first num_tokens[i] of row token_rows[i] of
    `token_ids` [max_rows, max_len], prompt and output. All arguments but these two are [num].

    repetition (Keskar et al. 2019): the logit of a known token is divided by it if positive, multiplied by it
    otherwise. Then frequency is taken off for each time that the token stands in the output, and presence once if it
    does (OpenAI's definitions).
    """
    for i, row in enumerate(logit_rows.tolist()):
        known, places = np.unique(token_ids[token_rows[i], : num_tokens[i]], return_inverse=True)
        counts = np.bincount(places[num_prompt_tokens[i] :], minlength=len(known)).astype(np.float32)
        where, times = torch.from_numpy(known.astype(np.int64)).to(logits.device), torch.from_numpy(counts).to(logits)
        values = logits[row, where]
        values = torch.where(values > 0, values / float(repetition[i]), values * float(repetition[i]))
        logits[row, where] = values - float(frequency[i]) * times - float(presence[i]) * (times > 0)
